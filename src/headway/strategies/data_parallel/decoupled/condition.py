"""Condition: what every part of an engine must know of the whole before it does anything."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from headway import torch_private
from headway.errors import HeadwayError, HeadwayWarning, UnsupportedError


class Condition:
    """Whether one engine can go on, and what the next backward has to do first.

    ``unfilled`` names the parameters without a gradient in the backward that is filling buckets.
    """

    def __init__(self) -> None:
        self.failure: HeadwayError | None = None
        self.closed = False
        self.filling = False  # a synchronised backward is filling buckets, or was interrupted while it did
        self.work_deferred = False  # since a backward began: the next one must complete it first
        self.gradients_kept = False  # a reduced gradient may be in flight
        self.unfilled: Callable[[], Sequence[str]] = tuple
        self._warned = False

    def defer_work(self) -> None:
        """Deferred work now exists; the next backward must complete it first."""
        self.work_deferred = self.gradients_kept = True

    def check_usable(self, *, inside_backward: bool = False) -> None:
        """Raise what went wrong before, or UnsupportedError where a backward never finished."""
        if self.failure is not None:
            raise self.failure
        if self.closed:
            raise UnsupportedError(
                "the process group of a decoupled model has been destroyed", fix="Wrap the model again."
            )
        if self.filling and not inside_backward and not torch_private.inside_backward():
            raise self.fail_unfinished()

    def fail(self, what: str, got: str, fix: str) -> UnsupportedError:
        """Note for good that training cannot go on; returns the error to raise."""
        error = UnsupportedError(what, got=got, fix=fix)
        self.failure = error
        return error

    def fail_unfinished(self) -> UnsupportedError:
        """Note for good that a backward left buckets unfilled; returns the error to raise."""
        missing = self.unfilled()
        return self.fail(
            "backward ended without a gradient for some parameters, or was interrupted",
            f"{len(missing)} without: {', '.join(missing[:3])}",
            "Use every trainable parameter in every backward, freeze the others, or pass "
            "find_unused_parameters=True.",
        )

    def warn_of_aliases(self, name: str) -> None:
        """Say, once, that overlap is lost for a bucket because somebody could look past the parameter."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"another tensor shares the memory of {name} (a state_dict(), view or array that was kept, or a "
                "loss whose backward did not run), so its bucket is updated inside step() and gains nothing. "
                "Keep a copy (clone), or delete it before step().",
                HeadwayWarning,
                stacklevel=2,
            )
