from __future__ import annotations

from headway.strategies.partial_all_reduce.coordinator.prometheus import MixingMeter
from headway.strategies.partial_all_reduce.matrices import Consensus, iterations_to_mix


def meter_of(workers: int) -> MixingMeter:
    meter = MixingMeter()
    for worker in range(workers):
        meter.joined(worker)
    return meter


def test_a_butterfly_mixes_in_as_many_rounds_as_it_has_dimensions() -> None:
    groups = [(0, 1), (2, 3), (4, 5), (6, 7), (0, 2), (1, 3), (4, 6), (5, 7), (0, 4), (1, 5), (2, 6), (3, 7)]
    meter = meter_of(8)
    told = [meter.averaged(group) for group in groups]
    assert told == [None] * 11 + [3.0]
    assert iterations_to_mix(groups, 8) == 3.0
    assert [meter.averaged(group) for group in groups][-1] == 3.0, "it begins anew"


def test_ranks_that_never_meet_never_mix() -> None:
    groups = [(0, 1), (2, 3)] * 50
    meter = meter_of(4)
    assert all(meter.averaged(group) is None for group in groups)
    assert iterations_to_mix(groups, 4) is None
    meter.gone(2)
    meter.gone(3)
    assert meter.averaged((0, 1)) == 1.0


def test_it_agrees_with_the_product_of_matrices() -> None:
    groups = [(0, 1), (1, 2), (0, 2), (0,), (1, 2), (0, 1), (2,)] * 6
    meter = meter_of(3)
    found = next(told for group in groups if (told := meter.averaged(group)) is not None)
    consensus, done = Consensus(3), 0
    for group in groups:
        consensus.averaged(group)
        done += len(group)
        if consensus.distance(range(3)) <= 0.01:
            break
    assert found == done / 3
