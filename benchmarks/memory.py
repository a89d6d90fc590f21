"""Memory of decoding by policy and length, from the accountant; writes `docs/results/memory.md` and `.png`.

    pip install -c constraints.txt -e ".[train]" && python benchmarks/memory.py

Nothing is run: models are made on the meta device.
"""

from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

import recurrent_depth as rd

RESULTS = Path(__file__).parent.parent / "docs" / "results"
GIB, BATCH, LENGTHS = 2**30, 32, [64 * n for n in range(1, 17)]


def cases() -> dict[str, tuple[rd.RecurrentTransformer, rd.KVStepPolicy]]:
    """The models of the published figures, and a policy for each."""
    with torch.device("meta"):
        dense, looped = rd.presets.gpt2_medium(), rd.presets.grt_medium()
    return {
        "GPT-2 Medium, 24 blocks": (dense, rd.KeepAll()),
        "GRT Medium 2+5×4+2, KeepAll": (looped, rd.KeepAll()),
        "GRT Medium, KeepCyclic(2)": (looped, rd.KeepCyclic(2)),
        "GRT Medium, KeepMean": (looped, rd.KeepMean()),
    }


def memory(model: rd.RecurrentTransformer, kv: rd.KVStepPolicy, tokens: int) -> rd.accounting.DecodeMemory:
    """What decoding takes up to so many tokens."""
    return rd.accounting.decode_memory(model, batch=BATCH, tokens=tokens, dtype=torch.bfloat16, kv=kv)


def table() -> str:
    """Weights, cache and peak at the longest text."""
    first = None
    rows = [
        "| model and policy | weights | cache | both | over dense | peak while decoding |",
        "|---|---|---|---|---|---|",
    ]
    for name, (model, kv) in cases().items():
        found = memory(model, kv, LENGTHS[-1])
        first = first or found.stored
        cells = [found.weights, found.cache, found.stored]
        rows.append(
            f"| {name} | " + " | ".join(f"{cell / GIB:.2f} GiB" for cell in cells)
            + f" | {found.stored / first:.2f} | {(found.stored + found.decoding) / GIB:.2f} GiB |"
        )  # fmt: skip
    return "\n".join(rows) + "\n"


def draw(path: Path) -> None:
    """Weights and cache by length, as a PNG."""
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(8, 4.2), layout="constrained")
        axes = figure.subplots()
        for name, (model, kv) in cases().items():
            axes.plot(LENGTHS, [memory(model, kv, n).stored / GIB for n in LENGTHS], label=name, linewidth=2)
        axes.set(xlabel=f"tokens per row, {BATCH} rows", ylabel="weights and cache (GiB)", ylim=(0, None))
        axes.set_xticks([0, 256, 512, 768, 1024])
        axes.legend(edgecolor="none")
        figure.savefig(path, dpi=120)


def main() -> None:
    """Writes both and prints the table."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "memory.md").write_text(table(), encoding="utf-8")
    draw(RESULTS / "memory.png")
    print(table())


if __name__ == "__main__":
    main()
