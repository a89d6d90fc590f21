"""A comparison of seconds, for the tests of `compare.py`."""

from functools import partial

from comparison.parts import Comparison, Full, Method, Protocol, Trials, cost, full_depth
from comparison.publishing import publish
from comparison.text import TextData

import recurrent_depth as rd

GATED = rd.Layout(1, 1, 3, 1)
METHODS = {
    "dense": Method("dense", partial(rd.dense, 3)),
    "blocks": Method("blocks, run once", partial(rd.dense, 1)),
    "grt": Method("GRT", partial(rd.grt, GATED)),
    "every": Method(
        "every exit",
        partial(rd.naive, rd.Layout(0, 1, 3, 0)),
        full_depth,
        partial(rd.WithObjective, objective=rd.every_step_loss, every_step=True),
        partial(cost, every_step=True),
        rate_of="grt",
    ),
}
COMPARISON = Comparison(
    data=TextData(vocab_size=300, length=16, num_rows=2, most_held_out=9),
    methods=METHODS,
    protocol=Protocol(budgets=(5, 10), warmup=2, rates=(1e-3, 2e-3)),
    plan=(
        *(Trials(name) for name in ("dense", "blocks", "grt")),
        *(Full(name, 0) for name in METHODS),
        Full("grt", 1),
        Full("dense", 1),
    ),
    dim=16,
    num_heads=2,
    baseline="dense",
    floor="blocks",
    publish=publish,
    pairs=(("grt", "dense"), ("every", "grt")),
)
