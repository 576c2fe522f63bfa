"""What is collected is let go of where that may wait; what is retired ends once every rank has left it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from headway.strategies.live.channels import retirement


class Left:
    """All ranks have left it."""

    def __init__(self) -> None:
        self.ended = 0

    def leave(self, *, exiting: bool = False) -> None:
        del exiting

    def everyone_left(self, timeout_s: float = 0.0) -> bool:
        del timeout_s
        return True

    def end(self) -> None:
        self.ended += 1


@pytest.fixture
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(retirement, "FIRST_LOOK_S", 0.0)
    yield
    retirement.end_unused()


@pytest.mark.usefixtures("looks_at_once")
def test_the_last_one_ends_in_a_step_that_others_follow_too() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    left, again, seen = Left(), Left(), []
    retirement.retire(left)
    handle = register_optimizer_step_post_hook(lambda *_: seen.append(left.ended))
    optimizer.step()
    assert seen == [1]
    retirement.retire(again)
    optimizer.step()
    handle.remove()
    assert (left.ended, again.ended) == (1, 1)


class Owner:
    """Something that can be collected."""

    def __init__(self) -> None:
        self.itself: Owner | None = None


def test_what_the_last_reference_to_goes_is_let_go_of_at_once() -> None:
    owner, gone = Owner(), list[str]()
    retirement.when_collected(owner, lambda: gone.append(threading.current_thread().name))
    del owner
    assert gone == [threading.main_thread().name]


@pytest.mark.parametrize("collect", ["here", "on another thread", "dropped on another thread"])
def test_what_goes_elsewhere_is_let_go_of_with_the_next_step(collect: str) -> None:
    owner, gone = Owner(), list[str]()
    retirement.when_collected(owner, lambda: gone.append(threading.current_thread().name))
    held = [owner]
    if collect != "dropped on another thread":
        owner.itself = owner
        held.clear()
    del owner
    if collect == "here":
        gc.collect()
    else:
        thread = threading.Thread(target=held.clear if held else gc.collect)
        thread.start()
        thread.join()
    assert gone == []
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.step()
    assert gone == [threading.main_thread().name]
