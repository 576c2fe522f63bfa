"""Settings for DDP and FSDP2, carried out by torch on two ranks: what it makes of them is what they say."""

from __future__ import annotations

import pytest
from tests import workers

CASES = "tests.behaviour.settings_cases"

pytestmark = pytest.mark.processes

PLANS: list[tuple[str, dict[str, object]]] = [
    ("ddp", {}),
    ("ddp", {"bucket_cap_mb": 0.01}),
    ("ddp", {"bucket_cap_mb": 0}),
    ("ddp", {"bucket_caps_mb": [0.001, 0.02, 0.007]}),
    ("parameter_server", {"bucket_cap_mb": 0.01}),
    ("decoupled", {"bucket_cap_bytes": 14_000}),
    ("decoupled", {"buckets": [["5.bias", "5.weight", "4.bias"], ["4.weight"], ["3.bias", "3.weight", "2.bias",
                   "2.weight", "1.bias", "1.weight", "0.bias", "0.weight"]]}),
]  # fmt: skip


def test_ddp_has_the_buckets_that_the_plan_decides() -> None:
    for by_case in workers.run(2, f"{CASES}:real_buckets", PLANS):
        for (name, options), found in zip(PLANS, by_case, strict=True):
            assert found["real"] == found["planned"], (name, options)
            assert found["real_bytes"] == found["planned_bytes"], (name, options)
        assert [len(found["real"]) for found in by_case[2:4]] == [12, 3]


def test_torchs_hooks_send_what_the_plan_sends_within_the_rounding_of_the_type() -> None:
    assert workers.run(2, f"{CASES}:hooked") == [[True, True]] * 2


def test_fsdp2_shards_tied_modules_together_and_leaves_frozen_ones_whole() -> None:
    for found in workers.run(2, f"{CASES}:sharded_tied_and_frozen", timeout_s=90):
        assert found["largest_difference"] < 1e-5
        assert found["frozen is whole"]
        assert found["parameters"] == found["expected parameters"]


@pytest.mark.parametrize("tool", ["ddp", "fsdp2"])
def test_passes_in_a_file_train_as_the_plan_does(tool: str) -> None:
    assert max(workers.run(2, f"{CASES}:with_passes", tool, timeout_s=90)) < 1e-5


@pytest.mark.parametrize(("own", "channels"), [(False, 1), (True, 2)])
def test_fsdp2_trains_the_same_and_gathers_ahead(own: bool, channels: int) -> None:
    for found in workers.run(2, f"{CASES}:sharded", own, channels, timeout_s=90):
        assert found["largest_difference"] < 1e-5
        groups, events = found["groups"], found["events"]
        assert sorted(name for group in groups for name in group) == ["attention", "first", "last", "norm"]
        assert events.count("gather") == len(groups) + own, "none in backward"
        assert events.count("scatter") == len(groups) + own
        for place, group in enumerate(groups):
            before = events[: events.index(group[0])].count("gather") - own
            assert before == min(len(groups), place + 1 + channels)
        assert any("of the root module" in lack for lack in found["lacks"]) == own
