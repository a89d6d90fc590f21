"""What each method costs beside a dense model of as many executed blocks; writes `docs/method-benchmarks.md`.

    pip install -c constraints.txt -e ".[train]" x-transformers && python benchmarks/methods.py

A method's time over the dense model's is divided by what is expected of it: the FLOPs that it executes over the dense
model's, and where tokens are decoded one by one also the numbers that are read for them. FLOPs are those of the very
run that is timed, counted by PyTorch (matrix products; attention scores aside), so that routed tokens, recomputed heads
and codas of every step are in them.
"""

import argparse
import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from side_by_side import ratios, shown, side_by_side
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from x_transformers import Decoder, TransformerWrapper

import recurrent_depth as rd

PAGE = Path(__file__).parent.parent / "docs" / "method-benchmarks.md"
LAYOUT, WHOLE = rd.Layout(1, 1, 6, 1), rd.Layout(0, 2, 4, 0)  # 8 executed blocks each
DENSE = "dense 8"
Run = Callable[[], object]


class Method(NamedTuple):
    """How a method is built and trained; `limit` is what its time may be of what its FLOPs explain."""

    build: Callable[..., nn.Module]
    train: Callable[[Any], nn.Module] = rd.WithObjective
    limit: float = 1.1


def learned_exit(model: rd.RecurrentTransformer) -> nn.Module:
    """Ouro's first stage."""
    return rd.WithObjective(model, rd.ExpectedExitLoss(rd.LearnedExit(model.embed.dim)), every_step=True)


class TwoRuns(nn.Module):
    """LoopFormer's loss, its shorter run of half the steps."""

    def __init__(self, model: rd.RecurrentTransformer):
        super().__init__()
        self.trained = rd.WithConsistency(model)
        self.short = model.num_steps // 2

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss."""
        return self.trained(tokens, self.short)


METHODS = {
    "naive `0+2×4+0`": Method(partial(rd.naive, WHOLE)),
    "ALBERT `0+1×8+0`": Method(partial(rd.albert, 8)),
    "GRT": Method(partial(rd.grt, LAYOUT)),
    "Huginn": Method(partial(rd.huginn, LAYOUT)),
    "Parcae": Method(partial(rd.parcae, LAYOUT)),
    "RRT, rank 16": Method(partial(rd.rrt, LAYOUT, rank=16)),
    "per-step embeddings": Method(partial(rd.ple, LAYOUT)),
    "MeSH": Method(partial(rd.mesh, LAYOUT)),
    "Ouro `0+2×4+0`, last step": Method(partial(rd.ouro, WHOLE)),
    "Ouro `0+2×4+0`, loss of every step": Method(
        partial(rd.ouro, WHOLE), lambda model: rd.WithObjective(model, rd.every_step_loss, every_step=True)
    ),
    "Ouro `0+2×4+0`, learned exit": Method(partial(rd.ouro, WHOLE), learned_exit),
    "Universal Transformer with ACT": Method(partial(rd.universal, WHOLE)),
    "gate × ACT": Method(partial(rd.grt, LAYOUT, update=lambda dim: rd.halted(dim, inner=rd.gated))),
    "LoopFormer, one run": Method(partial(rd.loopformer, WHOLE)),
    "LoopFormer, two runs and their consistency": Method(partial(rd.loopformer, WHOLE), TwoRuns),
    "damped looping": Method(partial(rd.grt, LAYOUT, update=rd.damped)),
    "MoR, expert choice": Method(partial(rd.mor, LAYOUT), limit=1.25),
    "MoR, token choice": Method(partial(rd.mor, LAYOUT, router=rd.token_choice), limit=1.25),
    "Mixture-of-Depths": Method(partial(rd.mod, LAYOUT), limit=1.25),
    "gate × routing": Method(partial(rd.mor, LAYOUT, update=rd.gated, combine=rd.Interpolate), limit=1.25),
}
PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)
PEERS = {"x-transformers, 8 blocks": False, "x-transformers, one block tied 8 times": True}


def sizes_of(dim: int, tokens: int) -> dict[str, int]:
    """What every builder takes; heads are 64 wide."""
    return {"dim": dim, "num_heads": max(dim // 64, 1), "vocab_size": 2048, "context_length": tokens}


def peer(tied: bool, sizes: dict[str, int]) -> nn.Module:
    """x-transformers' model of eight blocks, or of one block eight times, with our widths."""
    dim, heads = sizes["dim"], sizes["num_heads"]
    layers = Decoder(
        dim=dim, depth=1 if tied else 8, heads=heads, attn_dim_head=dim // heads, attn_flash=True,
        weight_tie_layers=False, **({"layers_execute_order": (0, 1) * 8} if tied else {}),
    )  # fmt: skip
    return TransformerWrapper(
        num_tokens=sizes["vocab_size"], max_seq_len=sizes["context_length"], tie_embedding=True, attn_layers=layers
    )


class NextToken(nn.Module):
    """A model that gives logits, with the loss of the next token."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss."""
        return rd.next_token_loss(self.model(tokens), tokens)


def training_step(trained: nn.Module, tokens: Tensor) -> Run:
    """Forward and backward at full depth; no optimizer, whose work goes with the weights and not with FLOPs."""
    trained.train()

    def run() -> None:
        trained(tokens).backward()
        trained.zero_grad(set_to_none=True)

    return run


def decoding(model: rd.RecurrentTransformer, prompt: Tensor, new: Tensor) -> Run:
    """New tokens one by one behind a prompt, again and again from the same cache."""
    model.eval()
    cache = rd.DepthCache(max_tokens=prompt.shape[1] + new.shape[1])
    with torch.no_grad():
        rd.extend(model, prompt, cache, logits_to_keep=1)
    begin = cache.length

    @torch.no_grad()
    def run() -> None:
        cache.crop(begin)
        for token in new.split(1, dim=1):
            rd.extend(model, token, cache)

    return run


def numbers_moved(*shapes: Sequence[int], out_shape: Sequence[int], **_: Any) -> int:
    """Numbers that a matrix product reads and writes, from the shapes of its operands."""
    return sum(math.prod(shape) for shape in (*shapes, out_shape))


def executed(run: Run) -> tuple[int, int]:
    """Matrix FLOPs of one run, and the numbers that its matrix products read and write."""
    with FlopCounterMode(display=False) as flops:
        run()
    with FlopCounterMode(display=False, custom_mapping=dict.fromkeys(PRODUCTS, numbers_moved)) as moved:
        run()
    return flops.get_total_flops(), sum(moved.get_flop_counts()["Global"].get(product, 0) for product in PRODUCTS)


class Measured(NamedTuple):
    """A method beside the dense model, over the rounds of one pass.

    Attributes:
        times: the ratio of times, round by round.
        flops: the ratio of FLOPs.
        moved: that of the numbers moved.
        bound: the share of the dense model's time that goes with FLOPs; the rest goes with the numbers moved.
    """

    times: list[float]
    flops: float
    moved: float
    bound: float = 1.0

    @property
    def explained(self) -> list[float]:
        """The ratio of times over the one expected."""
        return [time / (self.bound * self.flops + (1 - self.bound) * self.moved) for time in self.times]


def beside_dense(name: str, run: Run, dense: Run, rounds: int, bound: float = 1.0) -> Measured:
    """A method beside the dense model, round by round."""
    flops, moved = (mine / others for mine, others in zip(executed(run), executed(dense), strict=True))
    times = side_by_side({name: run, DENSE: dense}, rounds)
    return Measured(ratios(times, name, DENSE), flops, moved, bound)


def compute_bound(run: Run, doubled: Run, rounds: int) -> float:
    """The share of a run's time that goes with FLOPs: twice the rows add it once more, and read the same weights."""
    twice = median(ratios(side_by_side({"twice": doubled, "once": run}, rounds), "twice", "once"))
    return min(max(twice - 1, 0.0), 1.0)


def rows(dim: int, arguments: argparse.Namespace) -> Iterator[str]:
    """How decoding is bound, then a line for each method: its training step and its decoding."""
    sizes = sizes_of(dim, arguments.tokens)
    texts = torch.randint(sizes["vocab_size"], (arguments.batch, arguments.tokens))
    prompt, new = texts[:1].expand(arguments.rows, -1)[:, :-8], texts[:1].expand(arguments.rows, -1)[:, -8:]
    dense = rd.dense(8, **sizes)
    dense_step = training_step(rd.WithObjective(dense), texts)
    dense_decoding, doubled = (decoding(rd.dense(8, **sizes), *(x.repeat(n, 1) for x in (prompt, new))) for n in (1, 2))
    bound = compute_bound(dense_decoding, doubled, arguments.rounds)
    yield (
        f"Twice the rows take {1 + bound:.2f} times as long to decode in the dense model: "
        f"{bound:.0%} of its time goes with FLOPs, the rest with the numbers that are read." + COLUMNS
    )
    for name, method in METHODS.items():
        torch.manual_seed(0)
        step = training_step(method.train(method.build(**sizes)), texts)
        trained = beside_dense(name, step, dense_step, arguments.rounds)
        decoder = decoding(method.build(**sizes), prompt, new)
        decoded = beside_dense(name, decoder, dense_decoding, 3 * arguments.rounds, bound)
        yield line(name, trained, decoded, method.limit if dim >= 768 else None)
    for name, tied in PEERS.items():
        trained = beside_dense(name, training_step(NextToken(peer(tied, sizes)), texts), dense_step, arguments.rounds)
        yield line(name, trained, None, None)


def line(name: str, trained: Measured, decoded: Measured | None, limit: float | None) -> str:
    """A row of the table."""
    cells = [name, f"{trained.flops:.3f}", *times_of(trained, limit)]
    if decoded is None:
        return f"| {' | '.join(cells + [''] * 5)} |"
    time, explained = times_of(decoded, limit)
    of_flops = f"{median(decoded.times) / decoded.flops:.3f}"
    cells += [f"{decoded.flops:.3f}", f"{decoded.moved:.3f}", time, of_flops, explained]
    return f"| {' | '.join(cells)} |"


def times_of(measured: Measured, limit: float | None) -> list[str]:
    """Time, and what it is of the expected one: bold where it is above its limit."""
    explained = shown(measured.explained)
    if limit is not None and median(measured.explained) > limit:
        explained = f"**{explained}**"
    return [f"{median(measured.times):.3f}", explained]


HEADING = """# Benchmarks of the methods

Written by `python benchmarks/methods.py`. Each method runs in turns with a dense model of as many executed
blocks, eight. A row gives the matrix FLOPs that it executes over the dense model's, its time over the dense
model's, and that time over the expected one: the median over the rounds, with its quartiles. In training FLOPs are
what is expected. One token at a time also waits for the weights, which a block that runs for one row reads as well as
for all: there the expected time is a mean of FLOPs and of the numbers that the matrix products read and write, over the
dense model's, weighted as twice the rows show for the dense model itself; time over FLOPs alone stands beside it. At
width 768 no method may cost more than 1.10 times what is expected, or 1.25 times where tokens are picked; figures above
that are bold.

Loops are `{layout}` unless their name says otherwise, in the GPT-2 form, at full depth, uncompiled, float32.
Training: forward and backward on {batch} sequences of {tokens} tokens, without an optimizer. Decoding: 8
tokens, one by one, behind a prompt of {prompt}, {rows} rows, `KeepAll`. FLOPs are counted in the very run by
PyTorch's `FlopCounterMode`, scores of attention aside, so that what routers pick, and heads of every step, are
in them. Weights are untrained: a router that has learned nothing picks in decoding whomever it picks. {setting}

x-transformers offers two of these models: a dense one, and one block run eight times. The naive loop and ALBERT execute
the dense model's own blocks: how far they are from 1 says how exact a row is. Damped looping is trained by nobody; its
row says what its loop costs. At width 128 a block takes as long as a few small operations do: there a router costs more
time in decoding than the blocks that it saves.
"""
COLUMNS = """

| method | training: FLOPs | time | time / FLOPs | decoding: FLOPs | numbers | time | time / FLOPs | time / expected |
|---|---|---|---|---|---|---|---|---|
"""


def main() -> None:
    """Measures, prints line by line, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="rounds of training, at least 2; thrice of decoding")
    parser.add_argument("--dims", type=int, nargs="+", default=[768, 128], help="widths")
    parser.add_argument("--batch", type=int, default=2, help="sequences per training step")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--rows", type=int, default=8, help="rows that decode together")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    setting = (
        f"{arguments.rounds} rounds, {3 * arguments.rounds} of decoding, which is shorter; {arguments.threads} CPU "
        f"threads, {platform.machine()}, torch {torch.__version__}."
    )
    page = HEADING.format(
        layout=LAYOUT, batch=arguments.batch, tokens=arguments.tokens, prompt=arguments.tokens - 8,
        rows=arguments.rows, setting=setting,
    )  # fmt: skip
    for dim in arguments.dims:
        page += f"\n## Width {dim}\n\n"
        for row in rows(dim, arguments):
            print(row, flush=True)
            page += row.rstrip("\n") + "\n"
    PAGE.write_text(page, encoding="utf-8")
    print(f"Written to {PAGE}.")


if __name__ == "__main__":
    main()
