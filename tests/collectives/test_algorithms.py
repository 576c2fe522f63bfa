from __future__ import annotations

import pytest

from headway.collectives import algorithms, live
from headway.collectives.algorithms import ALL_GATHER, ALL_REDUCE, KINDS, NATIVE, REDUCE_SCATTER, RING
from headway.errors import PlanError


def test_both_halves_of_a_ring_share_a_cost_and_native_ones_do_not() -> None:
    assert {algorithms.cost_name(RING, kind) for kind in KINDS} == {"ring"}
    assert {algorithms.cost_name(RING, kind, 4) for kind in KINDS} == {"ring_4"}
    assert [algorithms.cost_name(NATIVE, kind) for kind in (REDUCE_SCATTER, ALL_GATHER, ALL_REDUCE)] == [
        "native_reduce_scatter",
        "native_all_gather",
        algorithms.GLOO_ALL_REDUCE,
    ]


def test_programs_are_those_of_the_names() -> None:
    program = algorithms.program_of(RING, REDUCE_SCATTER, 3)(1, 4)
    assert (program.algorithm, program.rank, program.world_size, program.pieces) == (
        "ring_reduce_scatter",
        1,
        4,
        3,
    )


@pytest.mark.parametrize(("algorithm", "kind"), [("tree", ALL_REDUCE), (RING, "broadcast")])
def test_unknown_names_are_refused(algorithm: str, kind: str) -> None:
    with pytest.raises(PlanError, match=r"unknown collective|does not support this collective"):
        algorithms.program_of(algorithm, kind)
    with pytest.raises(PlanError, match=r"unknown collective|does not support this collective"):
        algorithms.cost_name(algorithm, kind)
    with pytest.raises(PlanError, match=r"unknown collective|does not support this collective"):
        live.collective(algorithm, kind, 0, 2)
