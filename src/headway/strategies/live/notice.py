"""Hooks that tell a watch of steps. Copies and pickles of what they hang on get ones that do nothing."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from headway.strategies.live.channels import observer as observing
from headway.strategies.live.channels.observer import Collective, Observer


class Watch(Protocol):
    """Is told of what training stood still for, and of what was carried meanwhile."""

    def carried(self, done: Collective) -> None:
        """A collective was done, on a channel's thread."""

    def waited(self, start_ns: int, end_ns: int) -> None:
        """Training waited for communication."""

    def updated(self, owner: object, bucket: int, start_ns: int, end_ns: int) -> None:
        """Training applied what was due for a bucket of ``owner``."""

    def updated_in_background(self, owner: object, bucket: int, start_ns: int, end_ns: int) -> None:
        """This rank's share of a bucket was updated on a channel's thread."""


class Notice:
    """A hook that calls the method ``act`` of ``watch`` with ``name`` and what it is called with itself."""

    def __init__(self, watch: Any = None, act: str = "", name: str = "") -> None:
        self._watch = None if watch is None else weakref.ref(watch)
        self._act, self._name = act, name

    def __call__(self, *arguments: Any) -> None:
        """Tell the watch, if it is still there."""
        watch = None if self._watch is None else self._watch()
        if watch is not None:
            getattr(watch, self._act)(self._name, *arguments)

    def __deepcopy__(self, _memo: Any) -> Notice:
        """A hook for the copy, which nobody watches."""
        return Notice()

    def __reduce__(self) -> Any:
        """As for a copy."""
        return Notice, ()


class WaitObserver:
    """Tells a watch what training stood still for, and ``next``, which was there before, everything.

    ``over`` puts one in front of whoever observes, ``withdraw`` takes it away.
    """

    def __init__(self, watch: Watch, following: Observer) -> None:
        self._watch = weakref.ref(watch)
        self.next = following

    @classmethod
    def over(cls, watch: Watch) -> WaitObserver:
        """One that observes."""
        made = cls(watch, observing.observer())
        observing.set_observer(made)
        return made

    @property
    def is_told(self) -> bool:
        """Whether it observes: a recording that ends takes all observers away."""
        found: Any = observing.observer()
        while found is not None and found is not self:
            found = getattr(found, "next", None)
        return found is self

    def withdraw(self) -> None:
        """Give way to the one before, where nobody has come since."""
        if observing.observer() is self:
            observing.set_observer(self.next)

    @property
    def wants_transfers(self) -> bool:
        """Whether who was there before wants them."""
        return self.next.wants_transfers

    def collective(self, done: Collective) -> None:
        """Tell both."""
        if (watch := self._watch()) is not None:
            watch.carried(done)
        self.next.collective(done)

    def wait(self, name: str, bucket: int, start_ns: int, end_ns: int) -> None:
        """Tell both."""
        if (watch := self._watch()) is not None:
            watch.waited(start_ns, end_ns)
        self.next.wait(name, bucket, start_ns, end_ns)

    def update(self, owner: object, bucket: int, start_ns: int, end_ns: int) -> None:
        """Tell both."""
        if (watch := self._watch()) is not None:
            watch.updated(owner, bucket, start_ns, end_ns)
        self.next.update(owner, bucket, start_ns, end_ns)

    def background_update(self, owner: object, bucket: int, start_ns: int, end_ns: int) -> None:
        """Tell both."""
        if (watch := self._watch()) is not None:
            watch.updated_in_background(owner, bucket, start_ns, end_ns)
        self.next.background_update(owner, bucket, start_ns, end_ns)
