"""Replaying what is asked: in turns, without what cannot be worth it, and no longer than there is time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headway.errors import UserError
from headway.optimization.candidate import Candidate
from headway.planning.time_limit import TimeLimit
from headway.plugins import PluginFaultError, leave_out
from headway.scheduling.schedule import Schedule
from headway.strategies.base import Strategy

FASTEST = 3
"""So many of each strategy that were faster a plan has to be slower than for certain, before it is left out."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A plan to be replayed by ``replay``, which takes no less than ``lower_ms()`` (0 where nothing is known).

    ``always`` says that it is replayed whatever the others take, and however little time there is.
    """

    strategy: Strategy
    schedule: Schedule
    replay: Callable[[], Candidate]
    lower_ms: Callable[[], float] = lambda: 0.0
    always: bool = False


@dataclass(frozen=True, slots=True)
class Replays:
    """What was replayed, in the order in which it was asked for.

    ``pruned`` plans were not, as they are slower for certain, and ``unseen`` were not as time was up. ``refusals`` say
    why others cannot be.
    """

    candidates: tuple[Candidate, ...]
    pruned: int = 0
    unseen: int = 0
    refusals: tuple[str, ...] = ()


Progress = Callable[[int, int, str], None]
"""Is told how many of how many plans are done, and the best so far in words."""


def replay_all(
    asked: Sequence[Asked], limit: TimeLimit, progress: Progress | None = None, *, needed: str = ""
) -> Replays:
    """Replay ``asked``, strategies by turns, in each as they were asked for.

    A plan is not replayed where its bound says that it is slower, by more than ±, than ``FASTEST`` others of its
    strategy: it would be neither the best of it nor like the best. When time is up only what is ``always`` replayed is.
    What other packages' plug-ins fail at is left out with a warning. Raises PluginFaultError where that is the strategy
    ``needed``.
    """
    found: dict[int, Candidate] = {}
    of_strategy: dict[str, list[Candidate]] = defaultdict(list)
    pruned = unseen = 0
    refusals: list[str] = []
    best: Candidate | None = None
    for done, number in enumerate(_by_turns(asked), start=1):
        one = asked[number]
        if not one.always and limit.is_over():
            unseen += 1
            continue
        rivals = of_strategy[one.strategy.name]
        made = None
        try:
            if one.always or not is_slower_than_all(one, rivals):
                made = found[number] = one.replay()
        except PluginFaultError as fault:
            leave_out(fault, needed=needed)
            continue
        except UserError as refusal:  # too large, maybe: others may not be
            if one.always:
                raise
            refusals.append(str(refusal))
            continue
        if made is None:
            pruned += 1
        else:
            rivals.append(made)
            rivals.sort(key=lambda each: each.predicted_ms)
            best = made if best is None or made.predicted_ms < best.predicted_ms else best
        if progress and best:
            progress(done, len(asked), f"{best.name}, {best.predicted_ms:.1f} ms")
    return Replays(tuple(found[number] for number in sorted(found)), pruned, unseen, tuple(refusals))


def is_slower_than_all(one: Asked, rivals: Sequence[Candidate]) -> bool:
    """Whether ``one`` takes longer for certain than the ``FASTEST`` of ``rivals``, fastest first, by more than ±."""
    if len(rivals) < FASTEST:
        return False
    share = max(each.uncertainty_ms / each.predicted_ms for each in rivals[:FASTEST])
    return share < 1 and one.lower_ms() * (1 - share) > rivals[FASTEST - 1].predicted_ms


def _by_turns(asked: Sequence[Asked]) -> Iterator[int]:
    """The numbers of ``asked``: those that are always replayed, then one of each strategy, then another of each."""
    turns: dict[str, int] = defaultdict(int)
    places: list[tuple[bool, int, int]] = []
    for number, each in enumerate(asked):
        places.append((not each.always, turns[each.strategy.name], number))
        turns[each.strategy.name] += 1
    return (number for _, _, number in sorted(places))
