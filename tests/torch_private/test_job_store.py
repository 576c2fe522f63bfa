"""The job's store: what it does is the same, and a keeper that does not answer is given up."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import pytest
import torch.distributed as dist

from headway.errors import CommunicationError
from headway.torch_private.groups import JobStore

SOON = timedelta(milliseconds=1)
stores = cast(Any, dist)


class Stopped:
    """A store whose keeper answers nothing until it goes on."""

    timeout = SOON

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def check(self, _keys: Sequence[str], _timeout: timedelta = SOON) -> bool:
        self.goes_on.wait(60)
        return True

    wait = check


def test_operations_are_those_of_the_store() -> None:
    store = JobStore(stores.HashStore())
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert store.check(["key"])
    assert not store.check(["other"])
    assert (store.add("count", 2), store.add("count", 1)) == (2, 3)
    assert store.compare_set("key", "value", "new") == b"new"
    store.wait(["key"], SOON)
    assert store.delete_key("key")
    with pytest.raises(RuntimeError, match="imeout"):
        store.wait(["key"], SOON)


def test_a_keeper_that_does_not_answer_is_named_and_asked_again_once_it_goes_on() -> None:
    keeper = Stopped()
    store = JobStore(keeper, limit_s=0.05)
    try:
        with pytest.raises(
            CommunicationError, match="rank 0, which keeps the job's store, does not answer within"
        ):
            store.check(["key"])
        with pytest.raises(CommunicationError, match="rank 0"):  # at once: the one before is still asked
            JobStore(keeper, limit_s=1e6).check(["key"])
    finally:
        keeper.goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "headway-store":
            thread.join()
    assert store.check(["key"])


def test_a_wait_may_take_as_long_as_it_was_allowed_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    keeper = Stopped()
    threading.Timer(0.3, keeper.goes_on.set).start()
    JobStore(keeper, limit_s=0.01).wait(["key"], timedelta(seconds=30))
    keeper.goes_on.clear()
    with pytest.raises(CommunicationError, match="the launcher of host 0"):
        JobStore(keeper, limit_s=0.01).wait(["key"], SOON)
    keeper.goes_on.set()
