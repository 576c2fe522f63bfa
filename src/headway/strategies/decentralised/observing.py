"""Who is told of every round of this process, whatever model it is of, such as a recorder."""

from __future__ import annotations

from collections.abc import Callable

from headway.coordination.generator import Worker
from headway.strategies.decentralised.rounds import Round

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


def tell(worker: Worker, ended: Round) -> None:
    """A round has ended."""
    for told in _watching:
        told(worker, ended)
