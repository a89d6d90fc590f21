"""What the arguments of builders are: functions that make parts, not parts."""

from functools import partial

import pytest
from battery import tiny

import recurrent_depth as rd

TAKE_AN_UPDATE = {
    "grt": rd.grt,
    "rrt": partial(rd.rrt, rank=2),
    "ple": partial(rd.ple, size=8),
    "mor": rd.mor,
    "mod": rd.mod,
    "universal": rd.universal,
    "loopformer": rd.loopformer,
}


@pytest.mark.parametrize("build", TAKE_AN_UPDATE.values(), ids=TAKE_AN_UPDATE)
def test_an_update_that_is_made_already_is_refused(build):
    with pytest.raises(ValueError, match=r"update must be what makes the part.* GatedDepthUpdate, which is made"):
        tiny(build, update=rd.gated(16))


def test_an_inner_update_that_is_made_already_is_refused():
    with pytest.raises(ValueError, match=r"inner must be what makes the part.* GatedDepthUpdate, which is made"):
        rd.halted(16, inner=rd.gated(16))


@pytest.mark.parametrize("build", [rd.mor, rd.mod], ids=["mor", "mod"])
def test_a_router_that_is_made_already_is_refused(build):
    with pytest.raises(ValueError, match=r"router must be .*rd.expert_choice.* got ExpertChoice, which is made"):
        tiny(build, router=rd.expert_choice(16, 3))


def test_a_combination_that_is_made_already_is_refused():
    with pytest.raises(ValueError, match=r"combine must be .*rd.Interpolate; got AddWeighted, which is made"):
        tiny(rd.mor, combine=rd.AddWeighted())
