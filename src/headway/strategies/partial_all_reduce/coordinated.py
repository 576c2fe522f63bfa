"""Coordinated: how the workers of a job join the coordinator that forms their groups, and one model a process."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from headway.coordination.client import CoordinatorClient
from headway.coordination.service.generator_choice import GeneratorChoice
from headway.errors import UnsupportedError, UserError
from headway.strategies.partial_all_reduce.meeting import Coordination, Meeting
from headway.strategies.partial_all_reduce.runtime import PartialAllReduce


class Closable(Protocol):
    """A wrapped model whose training ends."""

    @property
    def is_closed(self) -> bool:
        """Whether it has finished, or was closed."""


_trained: weakref.WeakSet[Closable] = weakref.WeakSet()


def refuse_second() -> None:
    """Raise UnsupportedError where this process has a coordinated model that has not finished: it is one worker."""
    if any(not each.is_closed for each in _trained):
        raise UnsupportedError(
            "a process has one model that a coordinator's groups average", got="another one",
            expected="one, or static groups", fix="Call headway.finish(model) of the first one, or put both into one.",
        )  # fmt: skip


def is_trained(wrapped: Closable) -> None:
    """From now on ``wrapped`` is the coordinated model of this process, until it is closed."""
    _trained.add(wrapped)


def join(
    meeting: Meeting,
    choice: GeneratorChoice,
    found: Coordination,
    construct: Callable[[CoordinatorClient], PartialAllReduce],
) -> PartialAllReduce:
    """Have ``construct`` make this worker, who joins when the first one has. ``meeting`` has ``found`` the coordinator.

    Raises UserError where the coordinator forms other groups than ``choice``, and what ``construct`` raises.
    """
    try:
        meeting.after_the_first()
        worker = construct(client := CoordinatorClient(found.address, found.secret))
        if client.generator not in (None, str(choice)):
            worker.close()
            raise UserError(
                "the coordinator forms other groups than the plan says", got=client.generator,
                expected=str(choice), fix="Start it with headway coordinate --plan, or leave it to headway run.",
            )  # fmt: skip
    except BaseException as error:
        meeting.give_up(error)
        raise
    return worker
