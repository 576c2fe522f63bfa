"""A size of groups that there are too few workers for is not taken without a word."""

from __future__ import annotations

import warnings

import pytest
import torch.distributed as dist
from torch import nn

from headway.errors import HeadwayWarning
from headway.strategies.partial_all_reduce import wrapper
from headway.strategies.partial_all_reduce.policy import PartialAllReduceStrategy


@pytest.mark.parametrize(("size", "said"), [(8, True), (4, False), (None, False)])
def test_groups_larger_than_the_job_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, size: int | None, said: bool
) -> None:
    monkeypatch.setattr(wrapper, "existing_group", lambda _group: None)
    monkeypatch.setattr(dist, "get_world_size", lambda _group=None: 4)
    monkeypatch.setattr(dist, "get_rank", lambda _group=None: 0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        strategy = PartialAllReduceStrategy(groups="random", group_size=size)
        assert wrapper._schedule(nn.Linear(2, 2), strategy, 1.0) is None
    words = [str(each.message) for each in found if each.category is HeadwayWarning]
    assert ["group_size 8 exceeds the number of workers (4)" in each for each in words] == [True] * said
