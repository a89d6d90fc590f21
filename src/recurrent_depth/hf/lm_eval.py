"""The command line of lm-evaluation-harness with this library's models in it.

    python -m recurrent_depth.hf.lm_eval --model_args pretrained=FOLDER,num_steps=4 --tasks hellaswag

Every argument is the harness's own. `--model recurrent-depth` is the default here. Its arguments are those of the
harness's model `hf`, with a folder of a graft or of a native model as `pretrained`, and `num_steps`: how many steps
every request takes, which stands in the results. To compare with a graft's host: num_steps=1 is the host, or --model hf
with the host's own folder. LMEVAL_LOG_LEVEL=DEBUG shows where in the code an error arose.
"""

import importlib
import logging
import sys

from recurrent_depth.extras import require_extra

NAME = "recurrent-depth"


def main() -> None:
    """Runs the harness on the arguments of this process.

    Raises:
        SystemExit: if the harness is not installed, a value is wrong, or as the harness ends.
    """
    if not sys.argv[1:] or {"-h", "--help"} & set(sys.argv[1:]):
        sys.stdout.write(f"{__doc__}\n")
    try:
        _evaluate()
    except (ImportError, OSError, ValueError) as error:
        logging.getLogger(__name__).debug("Where it arose:", exc_info=True)
        sys.exit(f"error: {error}")


def _evaluate() -> None:
    require_extra("lm_eval", "eval", "recurrent_depth.hf.lm_eval")
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import model_registry  # pyright: ignore[reportMissingImports]

    importlib.import_module("lm_eval.models")  # makes the harness's own known, which it does only where it knows none
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
