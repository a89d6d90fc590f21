"""Between the training example's checkpoints and folders of `save_pretrained`, from whichever of the two is given."""

import argparse
import sys
from pathlib import Path

from recurrent_depth.hf.checkpoints import from_checkpoint, to_checkpoint
from recurrent_depth.hf.modeling import RecurrentDepthForCausalLM


def main(arguments: list[str]) -> None:
    """Converts from whichever of the two the source is."""
    parser = argparse.ArgumentParser(prog="python -m recurrent_depth.hf.convert", description=__doc__)
    parser.add_argument("source", type=Path, help="a checkpoint of the training example, or of save_pretrained")
    parser.add_argument("target", type=Path, help="where the other one is written")
    given = parser.parse_args(arguments)
    if (given.source / "config.json").exists():
        written = to_checkpoint(RecurrentDepthForCausalLM.from_pretrained(given.source), given.target)
    else:
        written = given.target
        from_checkpoint(given.source).save_pretrained(written)
    sys.stdout.write(f"{written}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
