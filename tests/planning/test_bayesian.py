from __future__ import annotations

import math
import sys

import pytest

from headway.errors import UserError
from headway.planning.bayesian import ThresholdSearch, share_over

pytest.importorskip("bayes_opt")


def step_s(threshold_mb: float) -> float:
    """Quickest at 64 MB."""
    return 0.3 + 0.05 * math.log2(threshold_mb / 64) ** 2


def searched(search: ThresholdSearch) -> list[float]:
    tried = []
    while not search.done:
        tried.append(search.ask())
        search.tell(tried[-1], step_s(tried[-1]))
    return tried


def test_ten_trials_from_the_published_start_within_the_bounds() -> None:
    search = ThresholdSearch()
    tried = searched(search)
    assert tried[0] == 25.0
    assert len(tried) == 10
    assert all(1.0 <= threshold <= 256.0 for threshold in tried)
    assert step_s(search.ask()) == min(step_s(threshold) for threshold in tried)
    assert step_s(search.ask()) < step_s(25.0)
    assert searched(ThresholdSearch()) == tried


def test_bounds_and_start_scale_with_the_model() -> None:
    tried = searched(ThresholdSearch(scale=0.01, trials=6))
    assert tried[0] == 0.25
    assert all(0.01 <= threshold <= 2.56 for threshold in tried)


def test_every_rank_uses_what_rank_zero_says() -> None:
    """Ranks that measure differently, which is what makes searches of their own go apart."""
    said: list[float] = []

    def first(value: float) -> float:
        said.append(value)
        return value

    leader = ThresholdSearch(rank=0, share=first)
    follower = ThresholdSearch(rank=1, share=lambda _: said[-1])
    for trial in range(14):
        asked = leader.ask(), follower.ask()
        assert asked[0] == asked[1]
        if not leader.done:
            leader.tell(asked[0], step_s(asked[0]))
            follower.tell(asked[1], 1.0 / (1 + trial))
        assert leader.done == follower.done


def test_without_the_library_rank_zero_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bayes_opt", None)
    with pytest.raises(UserError, match="bayesian-optimization"):
        ThresholdSearch()
    ThresholdSearch(rank=1, share=lambda value: value)


def test_sharing_takes_a_process_group(tmp_path: object) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert ThresholdSearch(share=share_over()).ask() == 25.0
    finally:
        dist.destroy_process_group()
