"""The command line of lm-evaluation-harness with this library's models in it.

    python -m recurrent_depth.hf.lm_eval --model_args pretrained=FOLDER,num_steps=4 --tasks hellaswag

Every argument is the harness's own. `--model recurrent-depth` is the default here, and takes the arguments of the
harness's model `hf` and `num_steps`, which stands in the results.
"""

import importlib.util
import sys

NAME = "recurrent-depth"


def main() -> None:
    """Runs the harness on the arguments of this process.

    Raises:
        SystemExit: if the harness is not installed, or as the harness ends.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise SystemExit("lm-evaluation-harness is not installed: pip install 'recurrent-depth[eval]'")
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import model_registry  # pyright: ignore[reportMissingImports]

    model_registry.register(NAME, target="recurrent_depth.hf.harness:RecurrentLM")
    sys.argv[1:] = with_model(sys.argv[1:])
    cli_evaluate()


def with_model(arguments: list[str]) -> list[str]:
    """The harness's arguments with this library's model in them, unless they name a model, a file, or no run."""
    if not arguments or arguments[0] in ("ls", "validate", "-h", "--help"):
        return arguments
    named = any(word.partition("=")[0] in ("--model", "-M", "--config", "-C") for word in arguments)
    rest = arguments[1:] if arguments[0] == "run" else arguments
    return ["run", *rest] if named or not rest else ["run", "--model", NAME, *rest]


if __name__ == "__main__":
    main()
