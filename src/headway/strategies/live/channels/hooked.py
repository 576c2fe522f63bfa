"""Channels behind a communication hook of DDP: they are given buckets, and DDP a future of each bucket's mean."""

from __future__ import annotations

import atexit
import secrets
import weakref
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from headway import torch_private
from headway.errors import CommunicationError, HeadwayError, UnsupportedError
from headway.strategies.live.channels import retirement
from headway.strategies.live.channels.communication import Channels, Culprit, Job, await_blocked
from headway.strategies.live.channels.departure import Departure
from headway.strategies.live.channels.wiring import groups_of_our_own, wiring_of
from headway.strategies.silent import in_words, silent_ranks


class HookedChannels:
    """Channels of one wrapped model on the CPU, each with connections of its own, until the model is let go of.

    Making them is collective. ``strategy`` is the name of the strategy that they are of.
    """

    def __init__(self, wrapped: DistributedDataParallel, channels: int, strategy: str) -> None:
        group = wrapped.process_group
        self._wrapped = weakref.ref(wrapped)
        wiring = wiring_of(torch.device("cpu"), group)
        self.rank, self.world_size = group.rank(), group.size()
        self.group = group
        self._groups = groups_of_our_own(group, wiring, channels)
        self._channels = Channels(self._groups, self._culprit(), wiring.streams, strategy)
        self._channels.use(channels)
        self._departure = _departure(self._groups.host[0])
        self._stopped = False
        _watch(self)

    def _culprit(self) -> Culprit:
        ranks = dist.get_process_group_ranks(self.group)
        groups = (*self._groups.host, *self._groups.second)
        key = f"headway/{torch_private.group_name(groups[0])}"

        def culprit(own_fault: str) -> str:
            for group in groups:  # those who wait for this rank are to meet the failure, too
                torch_private.abort_group(group)
            return own_fault or in_words(silent_ranks(key, ranks), "a peer")

        return culprit

    def serves(self, group: dist.ProcessGroup) -> bool:
        """Whether this cannot go on without ``group``."""
        return group in (self.group, dist.group.WORLD, *self._groups.all)

    def submit(self, job: Job, buffer: torch.Tensor) -> torch.futures.Future[Any]:
        """Queue ``job``, which puts a mean into ``buffer``; the future is done when it is there, or fails as that.

        Raises UnsupportedError as ``check_divisor`` does.
        """
        self.check_divisor()
        future: torch.futures.Future[Any] = torch.futures.Future()
        if self._stopped:
            gone = "the process group of this model has been destroyed: no gradient is reduced any more"
            future.set_exception(CommunicationError(gone))
            return future

        def then(error: HeadwayError | None) -> None:
            if error is None:
                future.set_result(buffer)
            else:
                future.set_exception(error)

        job.then = then
        self._channels.submit(job)
        if torch_private.inside_backward():
            # DDP cannot raise what a future failed with, and says that it is no tensor: this comes before it.
            torch_private.queue_backward_callback(partial(_raise_failure, job))
        return future

    def check_divisor(self) -> None:
        """Raise UnsupportedError where gradients are to be divided by fewer ranks than the group has.

        DDP tells hooks nothing of that.
        """
        wrapped = self._wrapped()
        if wrapped is not None and torch_private.divides_by_remaining_ranks(wrapped):
            raise UnsupportedError(
                "this plan divides gradients by the number of all ranks",
                got="join(divide_by_initial_world_size=False)",
                fix="Leave that out, or train under a plan of ddp or decoupled.",
            )

    def stop(self) -> None:
        """End the channels' threads."""
        if not self._stopped:
            self._stopped = True
            self._channels.stop()

    def abandon(self) -> None:
        """The wrapped model was collected: give back what was made for it as soon as every rank has let go of it."""
        if self._stopped:  # the groups have gone
            return
        self.stop()
        if self._channels.failure is None:
            retirement.retire(self)

    def leave(self, *, exiting: bool = False) -> None:
        """Tell the other ranks that this one has no more buckets."""
        del exiting
        self._departure.leave()

    def everyone_left(self, timeout_s: float = 0.0) -> bool:
        """Whether no rank has any more."""
        return self._departure.everyone_left(timeout_s)

    def end(self) -> None:
        """Give back the connections."""
        self._groups.end()


class HookedBuckets:
    """A DDP whose buckets ``channels`` carry behind its communication hook, until ``end``; made by all ranks.

    ``channels`` is None where it is alone in its job. ``mark`` is the attribute of the DDP that says what carries them;
    copies do not have it.
    """

    def __init__(
        self,
        wrapped: DistributedDataParallel,
        channels: HookedChannels | None,
        hook: Any,
        mark: str,
        value: Any,
    ) -> None:
        self._channels, self._hook, self._mark = channels, hook, mark
        if channels is not None:
            self._abandoning = retirement.when_collected(wrapped, channels.abandon)
        setattr(wrapped, mark, value)
        torch_private.copy_without_hook(wrapped, mark)
        self.hook(wrapped)

    def hook(self, wrapped: DistributedDataParallel) -> None:
        """Go on with another reducer of ``wrapped``."""
        if self._channels is not None:
            wrapped.register_comm_hook(self._channels, self._hook)

    def end(self, wrapped: DistributedDataParallel) -> None:
        """Leave ``wrapped``, which has let go of its reducer, without them."""
        delattr(wrapped, self._mark)
        torch_private.copy_with_hook(wrapped)
        if self._channels is not None and self._abandoning.detach():
            self._channels.abandon()


def _raise_failure(job: Job) -> None:
    job.done.wait()
    job.check()


def _departure(group: dist.ProcessGroup) -> Departure:
    """How the ranks of ``group`` tell of their leaving. Collective."""
    # A store may outlive a group whose name is used again.
    token = torch.tensor([secrets.randbits(62)])
    dist.broadcast(token, group=group, group_src=0)
    key = f"headway/{torch_private.group_name(group)}/{int(token)}"
    return Departure(
        torch_private.default_store(torch_private.SHORT_LIMIT_S), key, group.rank(), group.size()
    )


_alive: weakref.WeakSet[HookedChannels] = weakref.WeakSet()


def _watch(channels: HookedChannels) -> None:
    """Stop ``channels`` before the groups that they need, or the interpreter, go away."""
    _watch_groups()
    _alive.add(channels)


@cache
def _watch_groups() -> None:
    torch_private.before_group_shutdown(_before_shutdown)
    atexit.register(_at_exit)


def _before_shutdown(group: dist.ProcessGroup) -> None:
    for channels in [each for each in _alive if each.serves(group)]:
        channels.stop()


def _at_exit() -> None:
    for channels in list(_alive):
        channels.stop()
    await_blocked()
