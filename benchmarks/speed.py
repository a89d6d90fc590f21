"""Speed and memory of training, as ratios measured side by side in one run; writes `docs/benchmarks.md`.

    pip install -c constraints.txt -e ".[train]" transformers && python benchmarks/speed.py

The machine's noise hits all models of a round alike, so each figure is the median over rounds of a ratio within one
round. What a ratio should be is predicted from executed FLOPs before it is measured.
"""

import argparse
import os
import platform
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import torch
from live_bytes import LiveBytes
from side_by_side import ratio, side_by_side
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import recurrent_depth as rd

DIM, HEADS, VOCAB, TOKENS = 768, 12, 8192, 256
SIZES = {"dim": DIM, "num_heads": HEADS, "vocab_size": VOCAB, "context_length": TOKENS}
REPORT = Path(__file__).parent.parent / "docs" / "benchmarks.md"


def models() -> dict[str, nn.Module]:
    """The peers, each of 12 executed blocks."""
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=TOKENS, n_embd=DIM, n_head=HEADS, n_layer=12, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    return {
        "Hugging Face GPT-2": GPT2LMHeadModel(config),
        "dense 12": rd.dense(12, **SIZES),
        "naive 0+3×4+0": rd.naive(rd.Layout(0, 3, 4, 0), **SIZES),
        "GRT 1+1×10+1": rd.grt(rd.Layout(1, 1, 10, 1), **SIZES),
    }


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits at full depth, whichever family the model is of."""
    return model(tokens).logits if isinstance(model, GPT2LMHeadModel) else model(tokens)


def forward(model: nn.Module, tokens: Tensor, dtype: torch.dtype) -> Callable[[], None]:
    """One forward of a model that is held in `dtype`."""
    model = model.eval().to(dtype)

    def run() -> None:
        with torch.no_grad():
            logits_of(model, tokens)

    return run


def training_step(model: nn.Module, tokens: Tensor, dtype: torch.dtype) -> Callable[[], None]:
    """One full step at full depth: forward, backward, AdamW; float32 weights, autocast where `dtype` is narrower."""
    model = model.train().float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    device = tokens.device.type

    def run() -> None:
        with nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype):
            loss = rd.next_token_loss(logits_of(model, tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def predicted(name: str) -> float:
    """The ratio of executed FLOPs to the dense model's, the head included; the optimizer is left out."""
    with torch.device("meta"):
        peers = models()
    return rd.accounting.flops(peers[name], tokens=TOKENS) / rd.accounting.flops(peers["dense 12"], tokens=TOKENS)


def speed_rows(batch: int, rounds: int, device: str) -> list[str]:
    """One row of the table per pass and dtype."""
    rows = []
    tokens = torch.randint(VOCAB, (batch, TOKENS), device=device)
    for label, prepare in (("forward", forward), ("training step", training_step)):
        for dtype in (torch.float32, torch.bfloat16):
            runs = {name: prepare(model.to(device), tokens, dtype) for name, model in models().items()}
            times = side_by_side(runs, rounds, device)
            cells = [ratio(times, "dense 12", "Hugging Face GPT-2")]
            cells += [ratio(times, name, "dense 12") for name in ("naive 0+3×4+0", "GRT 1+1×10+1")]
            milliseconds = 1000 * median(times["dense 12"])
            rows.append(f"| {label} | {str(dtype)[6:]} | {milliseconds:,.0f} ms | {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    return rows


def checkpointing_rows(batch: int) -> list[str]:
    """What each further step adds to the memory that a forward keeps for its backward, in states."""
    tokens = torch.randint(VOCAB, (batch, TOKENS))
    model = rd.grt(rd.Layout(1, 1, 10, 1), **SIZES)
    state = batch * TOKENS * DIM * 4
    rows = []
    for label, checkpointing in (("everything kept", False), ("`core.checkpointing = True`", True)):
        model.core.checkpointing = checkpointing
        kept = {steps: kept_bytes(model, tokens, steps) for steps in (5, 10)}
        cells = (kept[10] / 2**20, (kept[10] - kept[5]) / 5 / state)
        rows.append(f"| {label} | {cells[0]:,.0f} MiB | {cells[1]:.3f} |")
        print(rows[-1], flush=True)
    return rows


def kept_bytes(model: rd.RecurrentTransformer, tokens: Tensor, num_steps: int) -> int:
    """Bytes alive after a forward of so many steps, weights aside."""
    with LiveBytes() as live:
        loss = rd.next_token_loss(model(tokens, num_steps), tokens)
        kept = live.now
    del loss
    return kept


def main() -> None:
    """Measures, prints and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds per row; each runs every model once")
    parser.add_argument("--batch", type=int, default=2, help="sequences of 256 tokens per pass")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    speed = speed_rows(arguments.batch, arguments.rounds, arguments.device)
    memory = checkpointing_rows(arguments.batch)
    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{arguments.threads} CPU cores"
    REPORT.write_text(report(speed, memory, machine, arguments), encoding="utf-8")
    print(f"Written to {REPORT}.")


def report(speed: list[str], memory: list[str], machine: str, arguments: argparse.Namespace) -> str:
    """The page."""
    setting = f"{machine}, {platform.machine()}, torch {torch.__version__}, batch {arguments.batch}"
    naive, gated = predicted("naive 0+3×4+0"), predicted("GRT 1+1×10+1")
    return "\n".join([
        "# Benchmarks",
        "",
        f"Written by `python benchmarks/speed.py --rounds {arguments.rounds}`. Every figure is the median over "
        f"{arguments.rounds} rounds of a ratio measured within one round, with its quartiles; this says what a model "
        "costs beside its peer on the same machine, not what it costs on yours.",
        "",
        f"{setting}; width {DIM}, {HEADS} heads, vocabulary {VOCAB:,}, {TOKENS} tokens, 12 executed blocks each. "
        "Forward: weights held in the dtype. Training step: float32 weights, forward and backward at full depth "
        "(bfloat16: under autocast) and AdamW. Hugging Face's GPT-2 has all dropouts at 0 and uses SDPA.",
        "",
        "| pass | dtype | dense 12 takes | dense 12 / Hugging Face GPT-2 | naive `0+3×4+0` / dense 12 | "
        "GRT `1+1×10+1` / dense 12 |",
        "|---|---|---|---|---|---|",
        f"| predicted by executed FLOPs | | | | {naive:.3f} | {gated:.3f} |",
        *speed,
        "",
        "## Memory with per-step checkpointing",
        "",
        f"Live bytes after the forward of GRT `1+1×10+1`, weights aside, batch {arguments.batch}, float32, counted by "
        "`benchmarks/live_bytes.py`; one state is (batch, token, dim).",
        "",
        "| activations | kept at 10 steps | states added by each further step |",
        "|---|---|---|",
        *memory,
        "",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
