"""The cells on text: every method on the same blocks, width and words, in the order in which their results are useful.

Blocks are GPT-2's for all but the Universal Transformer; Ouro has its second norms, which it cannot do without.
Embeddings are multiplied by sqrt(dim), unless a name says otherwise. Every loop stores three blocks, unless its name
says otherwise. `1+1×8+1` with a gate is nearest to twelve dense blocks at this width and window, counted in executed
FLOPs.
"""

from functools import partial

import torch

import recurrent_depth as rd
from comparison.parts import Comparison, Full, Method, Protocol, Trials, cost, full_depth, separate_exits
from comparison.publishing import publish
from comparison.text import TextData
from recurrent_depth import accounting

DIM, HEADS, ROWS = 64, 2, 16
GATED, PLAIN, NAIVE = rd.Layout(1, 1, 8, 1), rd.Layout(1, 1, 10, 1), rd.Layout(0, 3, 4, 0)
open_gate = partial(rd.gated, bias=0.0)


class NoisyState(rd.KeepState):
    """The blocks see the state with noise on it: a rung of the ladder that no builder has."""

    def forward(self, h, context, step):
        return h + 0.1 * torch.randn_like(h) if self.training else h


def noisy(dim: int) -> rd.ReplaceState:
    """The plain loop with noise."""
    return rd.ReplaceState(NoisyState())


def ungated(dim: int) -> rd.ReplaceState:
    """The GRT without its gate: noise and the anchor's projection."""
    return rd.ReplaceState(rd.ConcatProjection(dim, noise=rd.GaussianNoise(0.1)))


def grt(layout: rd.Layout = GATED, update=open_gate, **settings) -> Method:
    """A variant of the GRT, which takes its learning rate."""
    label = settings.pop("label", f"GRT {layout}")
    return Method(label, partial(rd.grt, layout, update=update), **{"rate_of": "grt", **settings})


def heavy_tail(model: rd.RecurrentTransformer, seed: int) -> rd.DepthSampler:
    """Huginn's, with draws that average full depth; the last half of the steps learns."""
    full = model.layout.num_steps
    return rd.PoissonLogNormalDepth(mean=full - 1, grad_steps=full // 2, seed=seed)


def per_row(model: rd.RecurrentTransformer, seed: int) -> rd.DepthSampler:
    """Parcae's."""
    full = model.layout.num_steps
    return rd.PoissonDepthPerRow(mean=full, num_rows=ROWS, grad_steps=full // 2, seed=seed)


def shorter(model: rd.RecurrentTransformer, seed: int) -> rd.DepthSampler:
    """LoopFormer's: the shallower of its two runs."""
    return rd.UniformDepth(model.layout.num_steps - 1, seed=seed)


def learned_exits(model: rd.RecurrentTransformer, entropy: float = 0.05) -> rd.WithObjective:
    """Ouro's first stage."""
    exits = rd.ExpectedExitLoss(rd.LearnedExit(model.embed.dim), entropy=entropy)
    return rd.WithObjective(model, exits, every_step=True)


def every_exit(model: rd.RecurrentTransformer) -> rd.WithObjective:
    """All exits alike."""
    return rd.WithObjective(model, rd.every_step_loss, every_step=True)


def both_runs(model: rd.RecurrentTransformer, depth: rd.Depth, length: int) -> float:
    """What LoopFormer's loss costs: a run at full depth beside the shallower one, and the logits of both made anew."""
    heads = 2 * accounting.flops_breakdown(model, length).head
    return cost(model, rd.Depth(model.layout.num_steps), length) + cost(model, depth, length) + heads


every_step_cost = partial(cost, every_step=True)
sandwich = partial(rd.GPT2Form, arrangement=rd.BranchSandwich)
ouro = partial(rd.ouro, NAIVE, form=sandwich)
halted_gate = partial(rd.halted, inner=open_gate, bias=-3.0)

FIRST = {
    "dense-12": Method("dense, 12 blocks", partial(rd.dense, 12)),
    "three-blocks": Method("three blocks, run once", partial(rd.dense, 3)),
    "naive": Method("naive loop", partial(rd.naive, NAIVE)),
    "grt": grt(label="GRT, bias 0", rate_of=None),
}
RELATIVES = {
    "huginn": Method("Huginn, heavy tail", partial(rd.huginn, GATED, form=rd.GPT2Form), heavy_tail, init_std=None),
    "mor": Method("MoR, expert choice", partial(rd.mor, PLAIN), full_depth),
    "rrt": Method("RRT, rank 4", partial(rd.rrt, NAIVE, rank=4), full_depth),
    "ouro-every-exit": Method("Ouro, all exits alike", ouro, full_depth, every_exit, every_step_cost),
}
ROUTED = {
    "mor-isoflops": Method(
        "MoR, expert choice, 20 steps", partial(rd.mor, rd.Layout(1, 1, 20, 1)), full_depth, rate_of="mor"
    ),
    "mod-isoflops": Method("MoD, 18 steps", partial(rd.mod, rd.Layout(1, 1, 18, 1)), full_depth, rate_of="mod"),
}
"""With as many steps as dense-12 has FLOPs for; with ten, as above, a router saves a third of them."""
ISOPARAMS = {
    "grt-isoparams": grt(rd.Layout(1, 10, 2, 1), label="GRT, isoPARAMS", rate_of=None),
    "naive-isoparams": Method("naive loop, isoPARAMS", partial(rd.naive, rd.Layout(0, 12, 2, 0))),
    "grt-isoparams-full-depth": grt(
        rd.Layout(1, 10, 2, 1), sampler=full_depth, label="GRT, isoPARAMS, always full depth", rate_of="grt-isoparams"
    ),
    "rrt-isoparams": Method("RRT, rank 4, isoPARAMS", partial(rd.rrt, rd.Layout(0, 10, 2, 0), rank=4), full_depth),
}
MORE = {
    "mod": Method("MoD", partial(rd.mod, PLAIN), full_depth),
    "universal": Method("Universal Transformer, ACT", partial(rd.universal, NAIVE), full_depth, init_std=None),
    "albert": Method("ALBERT", partial(rd.albert, 12, inner_dim=32), full_depth),
    "parcae": Method("Parcae", partial(rd.parcae, PLAIN, form=rd.GPT2Form), per_row),
    "mesh": Method("MeSH", partial(rd.mesh, PLAIN), full_depth),
    "loopformer": Method(
        "LoopFormer", partial(rd.loopformer, NAIVE), shorter, rd.WithConsistency, both_runs, separate_exits
    ),
    "ple": Method("embeddings per step", partial(rd.ple, NAIVE, size=16), full_depth),
}
ABLATIONS = {
    "naive-full-depth": Method("naive loop, always full depth", partial(rd.naive, NAIVE), full_depth, rate_of="naive"),
    "grt-bias-2": grt(update=partial(rd.gated, bias=2.0), label="GRT, bias 2"),
    "grt-bias-4": grt(update=partial(rd.gated, bias=4.0), label="GRT, bias 4"),
    "grt-one-step": grt(rd.Layout(1, 1, 1, 1), label="GRT of one step"),
    "grt-full-depth": grt(sampler=full_depth, label="GRT, always full depth"),
    "ladder-ends": grt(update=rd.plain, label="+ prelude and coda"),
    "ladder-noise": grt(update=noisy, label="+ state noise"),
    "ladder-anchor": grt(update=ungated, label="+ anchor (GRT without gate)"),
    "ungated-full-depth": grt(update=ungated, sampler=full_depth, label="GRT without gate, always full depth"),
    "grt-no-noise": grt(update=partial(open_gate, state_noise=0.0, gate_noise=0.0), label="GRT without noise"),
    "grt-init-0.02": grt(init_std=0.02, label="GRT, weights from N(0, 0.02²)"),
    "grt-act": grt(update=halted_gate, sampler=full_depth, label="gate × ACT"),
    "ouro": Method("Ouro, learned exit", ouro, full_depth, learned_exits, every_step_cost, rate_of="ouro-every-exit"),
    "ouro-entropy-0.1": Method(
        "Ouro, learned exit, entropy 0.1",
        ouro,
        full_depth,
        partial(learned_exits, entropy=0.1),
        every_step_cost,
        rate_of="ouro-every-exit",
    ),
    "grt-every-exit": grt(
        sampler=full_depth, objective=every_exit, cost=every_step_cost, label="GRT, a loss at every exit"
    ),
}
SPLITS = {
    f"split-{layout.prelude}-{layout.core}x{layout.num_steps}-{layout.coda}": grt(layout)
    for layout in (rd.Layout(0, 3, 3, 0), rd.Layout(1, 2, 4, 0), rd.Layout(0, 2, 4, 1), rd.Layout(2, 1, 8, 0))
}
UNSCALED = {
    f"{name}-unscaled": method._replace(label=f"{method.label}, embedding unscaled", scale_embedding=False)
    for name, method in FIRST.items()
}
FULL_DEPTH = ("naive-full-depth", "grt-full-depth")
WHAT_HOLDS_BACK = (*FULL_DEPTH, "grt-one-step", "ungated-full-depth", "grt-no-noise", "grt-init-0.02")
"""What may hold a loop back: that its depth is sampled, that it loops, its gate, its noise, its first weights."""
PAIRS = (
    ("grt", "naive"),
    ("grt", "dense-12"),
    ("naive", "dense-12"),
    ("naive", "three-blocks"),
    ("grt", "three-blocks"),
    ("grt-one-step", "three-blocks"),
    *((name, f"{name}-unscaled") for name in FIRST),
    ("naive-full-depth", "naive"),
    ("naive-full-depth", "three-blocks"),
    ("grt-full-depth", "three-blocks"),
    ("grt-full-depth", "naive-full-depth"),
    ("grt-full-depth", "grt-one-step"),
    ("rrt", "naive-full-depth"),
    ("grt", "grt-one-step"),
    ("grt", "grt-no-noise"),
    ("grt", "grt-init-0.02"),
    *(
        ("grt-full-depth" if method.sampler is full_depth else "grt", name)
        for name, method in {**RELATIVES, **MORE, **ROUTED}.items()
    ),
    ("ouro", "ouro-every-exit"),
    ("ouro-entropy-0.1", "ouro-every-exit"),
    ("grt-isoparams", "dense-12"),
    ("grt-isoparams", "naive-isoparams"),
    ("grt-isoparams-full-depth", "grt-isoparams"),
    ("grt-isoparams-full-depth", "rrt-isoparams"),
    ("rrt-isoparams", "dense-12"),
    ("ladder-ends", "naive"),
    ("ladder-noise", "ladder-ends"),
    ("ladder-anchor", "ladder-noise"),
    ("grt", "ladder-anchor"),
    ("grt", "grt-full-depth"),
    ("ladder-anchor", "ungated-full-depth"),
    ("grt-full-depth", "ungated-full-depth"),
    ("grt-bias-4", "grt"),
    ("grt-act", "grt-full-depth"),
)
"""GRT against the others, at full depth where they are; the ladder, rung by rung; and gate × sampled depth, which is a
square of four of these."""


METHODS = {**FIRST, **RELATIVES, **ISOPARAMS, **ABLATIONS, **SPLITS, **UNSCALED, **MORE, **ROUTED}


def plan() -> tuple[Trials | Full, ...]:
    """What is asked for most comes first: the first four, the relatives, one seed of the rest; then more seeds."""
    first = [Trials(name) for name in FIRST] + [Full(name, 0, 2) for name in FIRST]
    first += [Full("grt-one-step", 0, 2), Trials("huginn"), Full("huginn", 0, 2)]
    first += [Full(name, 1, 2) for name in FIRST] + [Full(name, 0) for name in FIRST]
    first += [Trials(name) for name in UNSCALED] + [Full(name, 0) for name in UNSCALED]
    first += [Full(name, 1, 2) for name in UNSCALED]
    relatives, same_size, more = (
        [cell for name in group for cell in (Trials(METHODS[name].rate_of or name), Full(name, 0, 2))]
        for group in (RELATIVES, ISOPARAMS, MORE)
    )
    varied = (*WHAT_HOLDS_BACK, *ABLATIONS, *SPLITS)
    short, further = ([Full(name, 0, most) for name in varied] for most in (1, 2))
    measured = ("grt-one-step", *FULL_DEPTH)
    first += [Full(name, 0) for name in measured]
    square = [Full(name, 0, 2) for name in ("ladder-anchor", "ungated-full-depth")]
    again = [Full(name, 1) for name in (*FIRST, *measured)]
    third = [Full(name, 2) for name in FIRST]
    routed = [Full(name, 0, 2) for name in ROUTED]
    second = [Full(name, 1, 2) for name in (*RELATIVES, *ISOPARAMS, *MORE)]
    rest = (*RELATIVES, *ISOPARAMS, *ABLATIONS, *SPLITS, *MORE, *ROUTED)
    longer = [Full(name, seed) for seed in (0, 1) for name in rest]
    return (*first, *relatives, *short, *same_size, *square, *again, *more, *third, *routed, *second, *further, *longer)


COMPARISON = Comparison(
    data=TextData(num_rows=ROWS),
    methods=METHODS,
    protocol=Protocol(budgets=(1464, 2928, 5856)),  # 3, 6 and 12 million tokens
    plan=plan(),
    dim=DIM,
    num_heads=HEADS,
    baseline="dense-12",
    floor="three-blocks",
    publish=publish,
    pairs=PAIRS,
)
