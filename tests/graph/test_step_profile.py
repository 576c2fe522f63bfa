from __future__ import annotations

import pytest
from tests.planning.jobs import layered_job
from tests.synthetic import MS, SyntheticJob, synthetic_trace

from headway.graph.computation import Item, Part, Point, Timeline
from headway.graph.recorded import timelines_of
from headway.graph.step_layout import profile_of


def test_a_recorded_step_gives_the_offsets_it_was_made_with() -> None:
    one = SyntheticJob(world_size=2, steps=3, forward_ms=8.0, backward_ms=20.0)
    profile = profile_of(timelines_of(synthetic_trace(one)))
    assert (profile.forward_ns, profile.backward_ns) == pytest.approx((8 * MS, 20 * MS))
    assert [profile.needs_ns[name] for name in one.modules] == pytest.approx([0, 2 * MS, 4 * MS, 6 * MS])
    ready = [profile.ready_ns[f"{name}.weight"] for name in reversed(one.modules)]
    assert ready == pytest.approx([5 * MS, 10 * MS, 15 * MS, 20 * MS])
    assert list(profile.ready_ns) == [f"{name}.weight" for name in reversed(one.modules)]
    assert profile.tail_ns + profile.rest_ns == pytest.approx(1.5 * MS)
    assert profile.optimizer_ns == pytest.approx(2 * MS)
    computed = sum(item.duration_ns for item in timelines_of(synthetic_trace(one))[0][0].items)
    assert profile.computation_ns + profile.optimizer_ns == pytest.approx(computed, rel=1e-3)


def test_the_slowest_rank_decides() -> None:
    one = SyntheticJob(world_size=3, steps=2, slow={(2, "backward"): 12.0})
    profile = profile_of(timelines_of(synthetic_trace(one)))
    assert profile.backward_ns == pytest.approx((one.backward_ms + 12) * MS)


def test_of_accumulated_passes_the_first_forward_and_the_last_backward_count() -> None:
    forward, backward = Item(Part.FORWARD, "", 10), Item(Part.BACKWARD, "", 20)
    items = (
        Item(Part.INPUT, "", 3), Item(Point.USE, "m"), forward, backward, Item(Point.USE, "m"), forward,
        Item(Part.REST, "", 1), backward, Item(Point.READY, "m.weight"), Item(Part.BACKWARD, "", 5),
        Item(Point.BACKWARD_END), Item(Part.FINALIZE, "", 50), Item(Part.REST, "", 2), Item(Point.STEP),
        Item(Part.OPTIMIZER, "", 7), Item(Part.REST, "", 4),
    )  # fmt: skip
    profile = profile_of({0: [Timeline(0, 0, items)]})
    assert (profile.forward_ns, profile.between_ns, profile.backward_ns) == (10, 31, 25)
    assert (profile.tail_ns, profile.rest_ns, profile.optimizer_ns) == (2, 7, 7)
    assert (dict(profile.needs_ns), dict(profile.ready_ns)) == ({"m": 0}, {"m.weight": 20})


def test_a_step_that_says_little_is_a_profile_all_the_same() -> None:
    assert profile_of({0: [Timeline(0, 0, ())]}).computation_ns == 0


def test_a_profile_is_that_of_its_own_timeline() -> None:
    for seed in range(20):
        profile = layered_job(
            [1000 * (seed + 1), 5000, 30], optimizer_ms=seed, rest_ms=seed / 3, seed=seed
        ).profile
        assert profile_of({0: (profile.timeline(),)}) == profile
