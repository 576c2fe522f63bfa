"""The wrapper as a script sees it, on one worker whose coordinator never finds it another one."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from headway.errors import HeadwayWarning, UnsupportedError, UserError
from headway.strategies.partial_all_reduce.coordinator.messages import GroupStart, Member
from headway.strategies.partial_all_reduce.joining import WorkerState
from headway.strategies.partial_all_reduce.runtime import UNSTEPPED, PartialAllReduce, Progress, wrap


class Alone:
    """A coordinator of one worker."""

    is_reachable = True
    incarnation = 0

    def __init__(self) -> None:
        self.reports: list[Mapping[str, float]] = []
        self.left = 0
        self._asked = 0

    def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        self.member = member
        return ()

    def ask(self, iteration: int) -> None:
        self._asked += 1

    def granted(self, timeout_s: float) -> GroupStart | None:
        return GroupStart(self._asked, f"g{self._asked}", [self.member])

    def vote(self, number: int, reduced: bool, timeout_s: float) -> bool:
        raise AssertionError("there is nobody to vote with")

    def outcome(self, number: int, timeout_s: float) -> bool | None:
        raise AssertionError("there is nothing to ask about")

    def report(self, metrics: Mapping[str, float]) -> None:
        self.reports.append(metrics)

    def leave(self) -> None:
        self.left += 1


@pytest.fixture
def opened() -> Iterator[list[PartialAllReduce]]:
    found: list[PartialAllReduce] = []
    yield found
    for each in found:
        each.close()


def wrapped(
    opened: list[PartialAllReduce], **options: Any
) -> tuple[PartialAllReduce, torch.optim.Optimizer, Alone]:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    coordinator = Alone()
    found = wrap(
        module, coordinator, optimizer, **{"worker": 0, "host": "127.0.0.1", "secret": b"s", **options}
    )
    opened.append(found)
    return found, optimizer, coordinator


def steps(found: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        found(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_worker_alone_trains_as_it_would_without(opened: list[PartialAllReduce], staleness: int) -> None:
    found, optimizer, coordinator = wrapped(opened, staleness=staleness)
    plain = copy.deepcopy(found.module)
    torch.manual_seed(5)
    steps(found, optimizer, 4)
    found.flush()
    torch.manual_seed(5)
    steps(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), 4)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), plain.parameters(), strict=True))
    assert found.iteration == 4
    assert [report["alone"] for report in coordinator.reports] == [1.0] * 4
    assert [report["group_size"] for report in coordinator.reports] == [1.0] * 4


def test_a_restored_worker_goes_on_as_if_it_had_not_stopped(opened: list[PartialAllReduce]) -> None:
    first, optimizer, _ = wrapped(opened)
    steps(first, optimizer, 3)
    file = io.BytesIO()
    torch.save(first.checkpoint(), file)
    steps(first, optimizer, 3)
    second, other, _ = wrapped(opened, initial="own")
    file.seek(0)
    second.restore(torch.load(file, weights_only=True))
    assert second.iteration == 3
    steps(second, other, 3)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    with pytest.raises(UserError, match="no checkpoint"):
        second.restore({"kind": "something"})


def test_a_worker_that_comes_back_and_finds_nobody_says_so(
    opened: list[PartialAllReduce], caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = Alone()
    coordinator.incarnation = 2
    wrapped = wrap(nn.Linear(2, 2), coordinator, worker=0, secret=b"s" * 16, host="127.0.0.1")
    opened.append(wrapped)
    assert "no other worker is there to copy the model from" in caplog.text
    assert wrapped.member.incarnation == 2


def test_moments_that_no_optimizer_has_yet_are_not_left_out_of_a_checkpoint(
    opened: list[PartialAllReduce],
) -> None:
    wrapped = wrap(nn.Linear(2, 2), Alone(), worker=0, secret=b"s" * 16, host="127.0.0.1")
    opened.append(wrapped)
    wrapped._awaited = WorkerState(3, "SGD", {"moment/weight/momentum_buffer": torch.ones(2, 2)}, {})
    assert wrapped._state().optimizer == "SGD"
    assert "moment/weight/momentum_buffer" in wrapped._state().tensors
    with pytest.raises(UserError, match="has not seen its optimizer yet"):
        wrapped.checkpoint()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    wrapped(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert wrapped.checkpoint()["optimizer"]["state"]


def test_learning_rates_by_progress(opened: list[PartialAllReduce]) -> None:
    seen: list[Progress] = []

    def rate(progress: Progress) -> float:
        seen.append(progress)
        return 0.1 / (1 + progress.iteration)

    found, optimizer, _ = wrapped(opened, learning_rate=rate)
    steps(found, optimizer, 3)
    assert [progress.iteration for progress in seen] == [0, 1, 2]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 3)


def test_the_optimizer_is_found_at_its_first_step_and_stays_the_only_one(
    opened: list[PartialAllReduce],
) -> None:
    module = nn.Linear(4, 1)
    found = wrap(module, Alone(), worker=0, host="127.0.0.1", secret=b"s")
    opened.append(found)
    first, second = (torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(2))
    steps(found, first, 2)
    other = nn.Linear(4, 1)
    steps(other, torch.optim.SGD(other.parameters(), lr=0.1), 2)  # of no concern
    assert found.iteration == 2
    with pytest.raises(UnsupportedError, match="two optimizers"):
        steps(found, second, 1)


def test_finishing_alone_keeps_the_model_and_ends_training(opened: list[PartialAllReduce]) -> None:
    found, optimizer, coordinator = wrapped(opened)
    steps(found, optimizer, 2)
    before = [parameter.clone() for parameter in found.parameters()]
    assert found.finish(timeout_s=5.0).workers == (0,)
    assert coordinator.left == 1
    assert all(torch.equal(a, b) for a, b in zip(before, found.parameters(), strict=True))
    steps(found, optimizer, 1)  # as an ordinary module
    with pytest.raises(UnsupportedError, match="finished"):
        found.finish()


def test_a_model_that_nobody_holds_any_more_is_let_go_of() -> None:
    found, optimizer, coordinator = wrapped([], staleness=1)
    steps(found, optimizer, 2)
    found.flush()
    gone, module = weakref.ref(found), found.module
    parts = found._resources
    del found
    gc.collect()
    assert gone() is None
    steps(module, optimizer, 1)  # where it may wait, in case the collector found it
    assert coordinator.left == 1
    assert parts.rounds._stopped
    assert len(coordinator.reports) == 2


def test_training_without_a_step_that_is_seen_is_told_of(opened: list[PartialAllReduce]) -> None:
    module = nn.Linear(4, 1)
    found = wrap(module, Alone(), worker=0, host="127.0.0.1", secret=b"s")
    opened.append(found)

    def train() -> None:
        for _ in range(UNSTEPPED):
            found(torch.ones(2, 4)).sum().backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad, alpha=0.01)

    with pytest.warns(HeadwayWarning, match="no torch.optim optimizer has stepped"):
        train()
    assert found.is_trained_unseen
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2 * UNSTEPPED):
            found(torch.ones(2, 4))


def test_a_model_that_cannot_be_sent_to_whoever_joins_is_refused(opened: list[PartialAllReduce]) -> None:
    module = nn.Linear(4, 1)
    module.register_buffer("table", torch.eye(3).to_sparse())
    with pytest.raises(
        UnsupportedError, match=r"cannot be sent to joining workers; got table, float32, sparse_coo"
    ):
        wrap(module, Alone(), worker=0, host="127.0.0.1", secret=b"s")


def test_refusals(opened: list[PartialAllReduce]) -> None:
    for options, match in (
        ({"staleness": 2}, "staleness must be 0 or 1"),
        ({"moments": "mine"}, "moments"),
        ({"buffers": "mine"}, "buffers"),
        ({"time_limit_s": 0}, "time_limit_s"),
        ({"worker": None}, "number"),
        ({"secret": None}, "secret"),
    ):
        with pytest.raises(UserError, match=match):
            wrapped(opened, **options)
    found, _, _ = wrapped(opened)
    with pytest.raises(UnsupportedError, match="copied"):
        copy.deepcopy(found)
    with pytest.raises(UserError, match="updates no parameter"):
        wrap(nn.Linear(1, 1), Alone(), torch.optim.SGD(nn.Linear(1, 1).parameters()), worker=0,
             host="127.0.0.1", secret=b"s")  # fmt: skip
