"""Speed and memory of decoding, as ratios measured side by side in one run; writes `docs/decoding-benchmarks.md`.

    pip install -c constraints.txt -e ".[train]" transformers x-transformers && python benchmarks/decoding.py

Every ratio stands beside its goal, and beside what FLOPs or bytes let expect. A run with `--only` replaces those
sections of the page and leaves the others; one with `--quick` tries everything on tiny models, and writes nothing.
"""

import argparse
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from decoding_rows import GRT, Scale, context, depth, latency, leaving, memory, rates, speculation

PAGE = Path(__file__).parent.parent / "docs" / "decoding-benchmarks.md"
QUICK = {
    "shrink": 8, "vocab": 512, "prompts": (16, 32), "long": 128, "new": 3, "batches": (1, 2), "many": (4, 20),
}  # fmt: skip


class Section(NamedTuple):
    """A part of the page."""

    title: str
    text: str
    columns: tuple[str, ...]
    rows: Callable[[Scale], Iterator[str]]


SECTIONS = {
    "rates": Section(
        "What the machine gives",
        "GB per second at which eight matrices of 768 columns are multiplied with one row, by the size of all eight: a "
        "loop gains over a dense model only while its weights stay in the last-level cache, and that is faster. "
        "One step of GRT `1+1×10+1` reads 17 MiB at width 768 in bfloat16, 23 MiB at width 640 in float32; one of "
        "`2+5×4+2` at width 512 reads 63 MiB in float32 and 32 MiB in bfloat16.",
        ("dtype", "4 MiB", "8 MiB", "16 MiB", "24 MiB", "48 MiB", "96 MiB"),
        rates,
    ),
    "latency": Section(
        "Time per token",
        "Over Hugging Face's GPT-2 of 12 blocks, with its own `DynamicCache`, SDPA and all dropouts at 0. Width 768, "
        "12 heads, vocabulary 50,304, 16 tokens one by one behind the prompt. Expected: this model over dense 12, by "
        "FLOPs of a token, and by bytes of weights and cache, each counted once, as is right where the loop's weights "
        "stay in the last-level cache. x-transformers' looped mode (`looped=True`) decodes no more than one row, and "
        "from the second new token on gives other logits than its own forward without a cache.",
        ("dtype", "batch", "prompt", "model", "over Hugging Face", "compiled", "by FLOPs", "by bytes", "goal"),
        latency,
    ),
    "depth": Section(
        "Where the loop fits the cache of the processor",
        "Looped over dense of as many executed blocks, `KeepAll`, batch 1, prompt 256; columns as above, and compiled "
        "over compiled.",
        ("layout", "width", "dtype", "dense takes", "over dense", "compiled", "by FLOPs", "by bytes", "goal"),
        depth,
    ),
    "memory": Section(
        "Memory",
        "The most bytes of tensors that are alive while a prompt of 256 tokens is read in one piece and 16 more are "
        "decoded, weights included, counted by `benchmarks/live_bytes.py`; and what `accounting.decode_memory` says. "
        "Goal: within 3%, and the core's part of a `KeepMean` cache exactly 1/10 of that of `KeepAll`.",
        ("model", "dtype", "batch", "measured", "accounted", "measured / accounted", "core cache / that of `KeepAll`"),
        memory,
    ),
    "exit": Section(
        "Leaving early",
        f"Tokens per second of {GRT} over those of its full depth, prompt 256. `KeepAll`, so that the copies of the "
        "steps not taken are filled. A depth per row: spread evenly over 1 to 10, deepest first, as `generate` sorts.",
        ("how", "dtype", "batch", "gain", "promised by FLOPs", "gain / promised", "goal"),
        leaving,
    ),
    "context": Section(
        "Long contexts",
        f"Cost per token of {GRT} at context 4,096 over that at 256, batch 1. Explained by FLOPs, or by bytes of "
        "weights and cache, each counted as often as it is used. In bfloat16 it is more than either explains: torch's "
        "CPU kernel computes so few queries slower than it reads their keys, and attention weighs more than its FLOPs.",
        ("dtype", "policy", "4,096 over 256", "by FLOPs", "by bytes", "goal"),
        context,
    ),
    "speculation": Section(
        "Self-speculative decoding",
        f"Tokens per second of `speculate` over those of `generate`, 32 tokens behind 64, batch 1, {GRT} untrained: "
        "this times the mechanics at the acceptance rate given; how often drafts are accepted depends on training.",
        ("dtype", "draft steps of 10", "accepted", "gain"),
        speculation,
    ),
}


def table(section: Section, scale: Scale) -> Iterator[str]:
    """The lines of a table, as they are measured."""
    yield f"| {' | '.join(section.columns)} |"
    yield "|---" * len(section.columns) + "|"
    yield from section.rows(scale)


def measured(section: Section, scale: Scale, setting: str) -> str:
    """A section of the page, printed line by line."""
    begin, lines = time.perf_counter(), []
    print(f"\n## {section.title}", flush=True)
    for line in table(section, scale):
        lines.append(line)
        print(line, flush=True)
    print(f"({time.perf_counter() - begin:,.0f} s)", flush=True)
    return "\n".join(["", section.text, "", setting, "", *lines, ""])


def write(parts: dict[str, str]) -> None:
    """Puts sections into the page; those that it has stay where they are not replaced."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    parts = dict(part.split("\n", 1) for part in text.split("\n## ")[1:]) | parts
    titles = [section.title for section in SECTIONS.values() if section.title in parts]
    page = [HEADING, *(f"## {title}\n{parts[title].rstrip()}\n" for title in titles)]
    PAGE.write_text("\n".join(page), encoding="utf-8")


HEADING = """# Decoding benchmarks

Written by `python benchmarks/decoding.py`. Every ratio is the median over the rounds of one measured within a round,
with its quartiles: it says what a model costs beside its peer on the same machine, not what it costs on yours. Beside
it stands what FLOPs (2 per multiply-add, the head included) or bytes (of weights, keys and values) let expect. Weights
are untrained and held in the dtype, as are keys and values.
"""


def main() -> None:
    """Measures, prints, and writes each section as soon as it is done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to measure")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per row, at least 2; each runs every model once")
    parser.add_argument("--compiled", type=int, nargs="*", default=[1], help="batches to measure compiled, too")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    parser.add_argument("--quick", action="store_true", help="tiny models; writes nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    scale = Scale(arguments.rounds, tuple(arguments.compiled), **QUICK if arguments.quick else {})
    setting = (
        f"{arguments.rounds} rounds, {arguments.threads} CPU threads, {platform.machine()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}."
    )
    for name in arguments.only:
        section = measured(SECTIONS[name], scale, setting)
        if not arguments.quick:
            write({SECTIONS[name].title: section})


if __name__ == "__main__":
    main()
