"""Who is told of every round of this process, whatever model it is of, such as a recorder; and who has no rounds."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from headway.coordination.generator import Worker
from headway.strategies.partial_all_reduce.rounds import Round

Told = Callable[[Worker, Round], None]
"""Takes a worker of this process and a round of it, at its end, on the thread that trains. It must not raise."""

_watching: list[Told] = []


def watch(told: Told) -> Callable[[], None]:
    """Have ``told`` called from now on, until what is returned is called."""
    _watching.append(told)

    def leave() -> None:
        if told in _watching:
            _watching.remove(told)

    return leave


_following: weakref.WeakSet[object] = weakref.WeakSet()


def follows(model: object) -> None:
    """This process trains ``model``, whose rounds another rank of its host goes through."""
    _following.add(model)


def is_following() -> bool:
    """Whether a model of this process takes over what another rank averages."""
    return bool(_following)


def tell(worker: Worker, ended: Round) -> None:
    """A round has ended."""
    for told in _watching:
        told(worker, ended)
