"""Handing down: what the first rank of a host ends a step with becomes what the host's other ranks hold.

After each step of the optimizer the first rank says a word in a tensor of five numbers, which all others wait for. If
its averaging has changed the model, the values follow, as they are now: so all ranks of a host hold the same bits,
however late a mean is taken and whatever became of a round.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist

from headway.errors import CommunicationError, UserError, one_line
from headway.strategies.live.averaged import Flat, Layout
from headway.strategies.live.channels.wiring import wiring_of

DIGEST_DIGITS = 15  # of hexadecimal ones: what an int64 holds


class Word(enum.IntEnum):
    """What the first rank has done: ``FAILED`` in the place of any other."""

    JOINED = 1
    STEPPED = 2
    FLUSHED = 3
    FINISHED = 4
    FAILED = 5


@dataclass(frozen=True, slots=True)
class Told:
    """What the first rank said: how many steps it has made, and whether all hosts have one model now.

    ``numbers`` go with the word: of JOINED which parameters have been averaged, of FINISHED which workers' models.
    """

    iteration: int
    is_common: bool
    numbers: tuple[int, ...] = ()


class HandingDown:
    """One rank's side of it, in ``group``, the ranks of its host. ``device`` is that of the model.

    All raise CommunicationError where a rank of the host is lost, within the time limit of ``group``.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._wiring = wiring_of(device, group)
        self._flat: Flat | None = None
        self._failing = 0
        self._is_lost = False

    @property
    def is_first(self) -> bool:
        """Whether this rank is the host's first."""
        return dist.get_rank() == self._ranks[0]

    def tell(
        self, word: Word, iteration: int, layout: Layout | None = None, *, is_common: bool = False,
        numbers: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Say to the others of the host what was done, and give them the values of ``layout`` if it has changed."""
        if len(self._ranks) == 1:
            return
        digest = 0 if layout is None else _short(layout)
        self._say([word, iteration, is_common, digest, len(numbers)])
        if numbers:
            self._say(numbers)
        if layout is not None:
            flat = self._flat_of(layout)
            layout.read(flat)
            self._broadcast(flat)

    def hear(self, word: Word, layout: Callable[[], Layout], iteration: int | None = None) -> Told:
        """Wait until the first rank has done ``word``, and take over the values that it gives, if it gives any.

        ``iteration`` is how many steps this rank has made. Raises UserError where the first rank does something else,
        has made another number of steps, or averages other tensors.
        """
        said, made, is_common, digest, count = self._heard(5)
        if said == Word.FAILED:
            raise CommunicationError(
                f"rank {dist.get_rank()}: rank {self._ranks[0]}, which averages for this host, failed; it says why"
            )
        if said != word or iteration not in (None, made):
            raise UserError(
                "ranks of one host do not do the same",
                got=f"rank {self._ranks[0]} {Word(said).name.lower()} after {made} steps, "
                f"rank {dist.get_rank()} {word.name.lower()} after {iteration}",
                expected="the same steps on all ranks of a host, as under DistributedDataParallel",
            )  # fmt: skip
        numbers = tuple(self._heard(count)) if count else ()
        if digest:
            own = layout()
            if _short(own) != digest:
                raise UserError(
                    "ranks of one host do not average the same tensors", got=f"rank {dist.get_rank()}",
                    expected="the model and the optimizer of the host's first rank",
                )  # fmt: skip
            flat = self._flat_of(own)
            self._broadcast(flat)
            own.write(flat)
        return Told(made, bool(is_common), numbers)

    @contextmanager
    def failure_told(self) -> Iterator[None]:
        """Where the block raises, the others of the host are told, and need not wait for their time limit."""
        self._failing += 1
        try:
            yield
        except Exception:
            if self._failing == 1 and not self._is_lost and len(self._ranks) > 1:
                with suppress(CommunicationError):
                    self._say([Word.FAILED, 0, 0, 0, 0])
            raise
        finally:
            self._failing -= 1

    def agree(self, number: int) -> bool:
        """Whether all ranks of the host have come with the same ``number``."""
        given = torch.tensor([number, -number], device=self._wiring.messages)
        with self._lost_if_it_fails():
            dist.all_reduce(given, dist.ReduceOp.MAX, group=self._group)
        most, least = given.tolist()
        return bool(most == -least)

    def _say(self, numbers: Sequence[int]) -> None:
        said = torch.tensor([int(number) for number in numbers], device=self._wiring.messages)
        self._broadcast(Flat([said]))

    def _heard(self, count: int) -> list[int]:
        found = torch.empty(count, dtype=torch.int64, device=self._wiring.messages)
        self._broadcast(Flat([found]))
        numbers: list[int] = found.tolist()
        return numbers

    def _flat_of(self, layout: Layout) -> Flat:
        if self._flat is None or not layout.fits(self._flat):
            self._flat = layout.empty(self._wiring.buffers)
        return self._flat

    def _broadcast(self, flat: Flat) -> None:
        with self._lost_if_it_fails():
            for whole in flat.wholes:
                dist.broadcast(whole, self._ranks[0], group=self._group)

    @contextmanager
    def _lost_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._is_lost = True
            others = ", ".join(str(rank) for rank in self._ranks if rank != dist.get_rank())
            raise CommunicationError(
                f"rank {dist.get_rank()}: of the other ranks of its host ({others}) one is lost, and the host cannot "
                f"go on without it; other hosts do: {one_line(str(error), 150)}"
            ) from error


def _short(layout: Layout) -> int:
    return int(layout.digest[:DIGEST_DIGITS], 16) or 1
