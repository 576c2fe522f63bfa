"""Ranks of one host that act as one worker: the leader averages, the followers receive its result."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from headway.errors import CommunicationError, UnsupportedError, UserError, one_line
from headway.strategies.live import checkpoint
from headway.strategies.live.averaged import Flat, Layout, Policy, training_layout, whole_layout
from headway.strategies.live.channels.wiring import wiring_of
from headway.strategies.live.checksum import checksum
from headway.strategies.live.stepping import Stepping, weakly
from headway.strategies.partial_all_reduce import averaging
from headway.strategies.partial_all_reduce.finishing import Finished
from headway.strategies.partial_all_reduce.generators.generator import Worker
from headway.strategies.partial_all_reduce.runtime import JOIN_LIMIT_S, PartialAllReduce

DIGEST_DIGITS = 15  # hexadecimal digits that fit an int64


class HostEvent(enum.IntEnum):
    """What the leader has done; ``FAILED`` can replace any other event."""

    JOINED = 1
    STEPPED = 2
    FLUSHED = 3
    FINISHED = 4
    FAILED = 5


@dataclass(frozen=True, slots=True)
class HostReport:
    """Report of the leader: its number of steps, and whether all hosts hold the same model now.

    ``numbers`` belong to the event: averaged parameters for JOINED, workers in the final mean for FINISHED.
    """

    iteration: int
    is_common: bool
    numbers: tuple[int, ...] = ()


class HostBroadcast:
    """Broadcasts the leader's model to the ranks of its host, ``group``, on ``device``.

    After each optimizer step the leader broadcasts an event as five integers, and all others wait for it. If averaging
    changed the model, its current values follow, so all ranks of a host hold the same bits, whenever a mean is applied.
    All methods raise CommunicationError within the time limit of ``group`` if a rank of the host is lost.
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
        """Whether this rank is the leader of its host."""
        return dist.get_rank() == self._ranks[0]

    def tell(
        self, word: HostEvent, iteration: int, layout: Layout | None = None, *, is_common: bool = False,
        numbers: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Broadcast an event, and the values of ``layout`` if they have changed."""
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

    def hear(self, word: HostEvent, layout: Callable[[], Layout], iteration: int | None = None) -> HostReport:
        """Wait for the leader's event, which must be ``word``, and write the values that it sends, if any.

        ``iteration`` is this rank's number of steps. Raises UserError if the leader sends another event, has made a
        different number of steps, or averages other tensors.
        """
        received, steps, is_common, digest, count = self._heard(5)
        if received == HostEvent.FAILED:
            raise CommunicationError(
                f"rank {dist.get_rank()}: rank {self._ranks[0]}, which averages for this host, failed. See its error"
            )
        if received != word or iteration not in (None, steps):
            raise UserError(
                "ranks of one host are out of step",
                got=f"rank {self._ranks[0]} {HostEvent(received).name.lower()} after {steps} steps, "
                f"rank {dist.get_rank()} {word.name.lower()} after {iteration}",
                expected="the same steps on all ranks of a host, as under DistributedDataParallel",
            )  # fmt: skip
        numbers = tuple(self._heard(count)) if count else ()
        if digest:
            current = layout()
            if _short(current) != digest:
                raise UserError(
                    "ranks of one host do not average the same tensors", got=f"rank {dist.get_rank()}",
                    expected="the model and the optimizer of the host's first rank",
                )  # fmt: skip
            flat = self._flat_of(current)
            self._broadcast(flat)
            current.write(flat)
        return HostReport(steps, bool(is_common), numbers)

    @contextmanager
    def failure_told(self) -> Iterator[None]:
        """Tell the other ranks of the host if the block raises, so that they need not wait for their time limit."""
        self._failing += 1
        try:
            yield
        except Exception:
            if self._failing == 1 and not self._is_lost and len(self._ranks) > 1:
                with suppress(CommunicationError):
                    self._say([HostEvent.FAILED, 0, 0, 0, 0])
            raise
        finally:
            self._failing -= 1

    def agree(self, number: int) -> bool:
        """Whether all ranks of the host passed the same ``number``."""
        extremes = torch.tensor([number, -number], device=self._wiring.messages)
        with self._lost_if_it_fails():
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group)
        most, least = extremes.tolist()
        return bool(most == -least)

    def _say(self, numbers: Sequence[int]) -> None:
        tensor = torch.tensor([int(number) for number in numbers], device=self._wiring.messages)
        self._broadcast(Flat([tensor]))

    def _heard(self, count: int) -> list[int]:
        tensor = torch.empty(count, dtype=torch.int64, device=self._wiring.messages)
        self._broadcast(Flat([tensor]))
        numbers: list[int] = tensor.tolist()
        return numbers

    def _flat_of(self, layout: Layout) -> Flat:
        if self._flat is None or not layout.fits(self._flat):
            self._flat = layout.empty(self._wiring.buffers)
        return self._flat

    def _broadcast(self, flat: Flat) -> None:
        with self._lost_if_it_fails():
            for tensor in flat.wholes:
                dist.broadcast(tensor, self._ranks[0], group=self._group)

    @contextmanager
    def _lost_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._is_lost = True
            peers = ", ".join(str(rank) for rank in self._ranks if rank != dist.get_rank())
            raise CommunicationError(
                f"rank {dist.get_rank()}: lost one of the other ranks of this host ({peers}), which cannot continue "
                f"without it; other hosts continue: {one_line(str(error), 150)}"
            ) from error


def _short(layout: Layout) -> int:
    return int(layout.digest[:DIGEST_DIGITS], 16) or 1


BUFFERS: Policy = "averaged"


class HostLeader(PartialAllReduce):
    """First rank of a host and its worker: broadcasts the model after each step, ``flush`` and ``finish``."""

    is_called: ClassVar[bool] = False

    def __init__(
        self, module: nn.Module, coordinator: Any, optimizer: Optimizer | None, *, down: HostBroadcast, hosts: int,
        **options: Any,
    ) -> None:  # fmt: skip
        self._down, self._hosts = down, hosts
        super().__init__(module, coordinator, optimizer, buffers=BUFFERS, **options)

    @property
    def is_common(self) -> bool:
        """Whether all hosts hold the same model."""
        last = self.last_round
        if last is None:
            return not self.iteration
        return (last.iteration, last.staleness, len(last.members)) == (self.iteration, 0, self._hosts)

    @property
    def optimizer(self) -> Optimizer | None:
        """The model's optimizer, once known."""
        return self._stepping.optimizer

    def flush(self) -> None:
        """As ``PartialAllReduce.flush``, on all ranks of the host."""
        with self._down.failure_told():
            committed = self._averaging.committed
            super().flush()
            self._hand_down(HostEvent.FLUSHED, committed)

    def finish(self, source: Worker | None = None, timeout_s: float = JOIN_LIMIT_S) -> Finished:
        """As ``PartialAllReduce.finish``, on all ranks of the host."""
        with self._down.failure_told():
            finished = super().finish(source, timeout_s)
            layout = whole_layout(self.module, buffers=BUFFERS)
            workers = (*finished.workers, finished.given_by)
            self._down.tell(HostEvent.FINISHED, self.iteration, layout, is_common=True, numbers=workers)
        return finished

    def tell_joined(self) -> None:
        """Tell the other ranks of the host that this one has joined the job."""
        self._down.tell(HostEvent.JOINED, self.iteration, numbers=numbers_of(self.module, self._earlier))

    def _after_step(self) -> None:
        with self._down.failure_told():
            committed = self._averaging.committed
            super()._after_step()
            self._hand_down(HostEvent.STEPPED, committed)

    def _hand_down(self, word: HostEvent, committed: int) -> None:
        changed = self._averaging.committed > committed
        self._down.tell(word, self.iteration, self._layout() if changed else None, is_common=self.is_common)


class HostFollower:
    """Any other rank of a host: receives the leader's model after each step."""

    def __init__(
        self, module: nn.Module, optimizer: Optimizer | None, *, down: HostBroadcast, moments: Policy
    ) -> None:
        self.module = module
        self._down, self._moments = down, moments
        self.iteration = 0
        self._earlier: set[str] = set()  # parameters that have been averaged
        self.is_common = True
        self.is_closed = False
        self._stepping = Stepping(
            module,
            lambda _: None,
            weakly(self, HostFollower._refuse_closed),
            weakly(self, HostFollower._after_step),
        )
        weakref.finalize(self, self._stepping.close).atexit = False
        averaging.follows(self)
        if optimizer is not None:
            self._stepping.bind(optimizer)

    @property
    def optimizer(self) -> Optimizer | None:
        """The model's optimizer, once known."""
        return self._stepping.optimizer

    def joined(self) -> None:
        """Wait until the leader has joined the job."""
        report = self._down.hear(HostEvent.JOINED, self._layout)
        self.iteration = report.iteration
        self._earlier = set(named(self.module, report.numbers))

    def changes(self) -> None:
        """Do nothing: no worker copies this rank's state."""

    def updated_by(self, optimizer: Optimizer) -> None:
        """As of ``PartialAllReduce``."""
        self._stepping.bind_once(optimizer)

    def flush(self) -> None:
        """Receive the result of the leader's ``flush``."""
        self._heard(self._down.hear(HostEvent.FLUSHED, self._layout, self.iteration))

    def finish(self, source: Worker | None = None, timeout_s: float = JOIN_LIMIT_S) -> Finished:
        """Receive the final model. ``source`` and ``timeout_s`` concern only the leader."""
        del source, timeout_s
        self._refuse_closed()
        self.flush()
        try:
            final = whole_layout(self.module, buffers=BUFFERS)
            report = self._down.hear(HostEvent.FINISHED, lambda: final, self.iteration)
        finally:
            self.close()
        self._heard(report)
        *workers, given_by = report.numbers
        return Finished(tuple(workers), given_by)

    def checkpoint(self) -> dict[str, Any]:
        """As of ``PartialAllReduce``."""
        self.flush()
        saved = checkpoint.saved(self.module, self.optimizer, self.iteration)
        return {**saved, "averaged": sorted(self._earlier)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """As of ``PartialAllReduce``."""
        self.iteration = checkpoint.restore(state, self.module, self.optimizer)
        self._earlier.update(state.get("averaged", ()))

    def close(self, *, leave: bool = True) -> None:
        """Follow no more steps."""
        del leave
        self.is_closed = True
        self._stepping.close()

    def _after_step(self) -> None:
        self.iteration += 1
        self._layout()  # records which parameters are averaged, as the leader does
        self._heard(self._down.hear(HostEvent.STEPPED, self._layout, self.iteration))

    def _heard(self, report: HostReport) -> None:
        self.is_common = report.is_common

    def _layout(self) -> Layout:
        layout = training_layout(
            self.module, self.optimizer, buffers=BUFFERS, moments=self._moments, earlier=self._earlier
        )
        self._earlier |= layout.parameters
        return layout

    def _refuse_closed(self) -> None:
        if self.is_closed:
            raise UnsupportedError(
                "the model is closed or has finished", fix="Train its .module, or wrap that again."
            )


def numbers_of(module: nn.Module, names: Collection[str]) -> list[int]:
    """Return the positions of the parameters ``names`` in ``module``."""
    return [number for number, (name, _) in enumerate(module.named_parameters()) if name in names]


def named(module: nn.Module, numbers: Collection[int]) -> list[str]:
    """Return the names of the parameters at positions ``numbers``."""
    return [name for number, (name, _) in enumerate(module.named_parameters()) if number in numbers]


def check_same(rank: HostLeader | HostFollower, down: HostBroadcast) -> None:
    """Raise UserError on all ranks of a host if they were restored from different states."""
    state = [] if rank.optimizer is None else [rank.optimizer.state[key] for key in rank.optimizer.state]
    moments = [value for values in state for value in values.values() if hasattr(value, "element_size")]
    tensors = [
        parameter for parameter in (*rank.module.parameters(), *moments) if parameter.element_size() > 1
    ]
    if not down.agree((checksum(tensors) + 7 * rank.iteration) % 2**62):
        raise UserError(
            "ranks of one host were restored from different checkpoints",
            expected="the same model, optimizer and iteration on all ranks of a host",
            fix="Restore all of them from the checkpoint of one.",
        )  # fmt: skip
