"""Between the training example's checkpoints and folders of `save_pretrained`, from whichever of the two is given."""

import argparse
import sys
from pathlib import Path

from recurrent_depth.hf.checkpoints import find_checkpoint, from_checkpoint, to_checkpoint
from recurrent_depth.hf.example_tokens import put_back, tokenizer_of
from recurrent_depth.hf.modeling import RecurrentDepthForCausalLM


def main(arguments: list[str]) -> None:
    """Converts from whichever of the two the source is; the tokenizer goes along.

    Raises:
        SystemExit: with code 2, if there is no such source, or it cannot be converted.
    """
    parser = argparse.ArgumentParser(prog="python -m recurrent_depth.hf.convert", description=__doc__)
    parser.add_argument("source", type=Path, help="a checkpoint of the training example, or of save_pretrained")
    parser.add_argument("target", type=Path, help="where the other one is written")
    given = parser.parse_args(arguments)
    convert = _to_checkpoint if (given.source / "config.json").exists() else _to_folder
    if not given.source.exists():
        parser.error(f"source is {given.source}, but there is no such file or folder.")
    if given.target.exists() and not (given.target.is_dir() and not any(given.target.iterdir())):
        parser.error(f"target is {given.target}, where there is something already: name a new folder.")
    try:
        sys.stdout.write(f"{convert(given.source, given.target)}\n")
    except (OSError, ValueError) as error:
        parser.error(str(error))


def _to_folder(source: Path, target: Path) -> Path:
    from_checkpoint(source).save_pretrained(target)
    tokenizer = tokenizer_of(find_checkpoint(source))
    if tokenizer is None:
        sys.stderr.write(
            f"{target} has no tokenizer: the run was on token ids, or its tokenizer.json does not lie beside its "
            "models' folders. Where you have it, save it there: tokenizer.save_pretrained(...).\n"
        )
    else:
        tokenizer.save_pretrained(target)
    return target


def _to_checkpoint(source: Path, target: Path) -> Path:
    written = to_checkpoint(RecurrentDepthForCausalLM.from_pretrained(source), target)
    put_back(source, find_checkpoint(written))
    return written


if __name__ == "__main__":
    main(sys.argv[1:])
