"""Channels for a device with NCCL: streams in the place of threads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from headway import torch_private
from headway.scheduling.buckets import channel_of
from headway.strategies.live.channels.communication import Channels, Job
from headway.strategies.live.channels.streams import Streams, wait_on_host

HIGH_PRIORITY = -1


class StreamChannels:
    """In the place of ``Channels`` for NCCL: a job is given to the device at once, and nobody waits for it on the host.

    Every channel has a stream and a process group, so a communicator, of its own. All jobs of a bucket use one channel:
    what its updates allocate is then used on one stream. Jobs that are no bucket's exchange a few numbers between
    scripts; ``host`` runs them on the CPU. Only a job behind one of these waits on the host: with
    ``find_unused_parameters`` a step has to know what was used.

    A job that could not be given to the device fails as under ``Channels``. What goes wrong on the device surfaces
    where torch reports it: at the group's timeout NCCL's watchdog ends the process.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], host: Channels, streams: Streams) -> None:
        self._groups = tuple(groups)
        self._host = host
        self._streams = streams
        self._lanes = [streams.new(HIGH_PRIORITY) for _ in groups]
        self._active = len(self._groups)
        self.submitted = 0
        self.last: Job | None = None
        for group, lane in zip(self._groups, self._lanes, strict=True):
            # A communicator is made by its first use, which ranks must come to in one order: not inside a backward.
            with streams.on(lane), torch_private.without_user_modes():
                dist.all_reduce(torch.zeros(1, device=streams.device), group=group)
                wait_on_host(lane)

    def use(self, count: int) -> None:
        """Use the first ``count`` channels from now on."""
        self._active = count

    def submit(self, job: Job) -> Job:
        """Give ``job`` to the device, behind what the current stream has been given and behind ``job.after``."""
        if job.bucket < 0:
            return self._host.submit(job)
        self._host.refuse_forked()
        job.sequence = self.submitted
        self.submitted += 1
        self.last = job
        if self._host.failure is None:
            try:
                self._give(job, channel_of(job.bucket, self._active))
            except Exception as error:
                self._fail(job, error)
            except BaseException as error:  # interrupted half-way: peers would wait for the rest
                self._fail(job, error)
                raise
        job.error = self._host.failure
        job.done.set()
        return job

    def _give(self, job: Job, channel: int) -> None:
        ready = self._streams.mark()
        with self._streams.on(self._lanes[channel]), torch_private.without_user_modes():
            self._streams.follow(ready)
            for earlier in job.after:
                self.wait(earlier)
            collective = job.bound(channel)
            with job.around():
                collective(job.tag)
            job.event = self._streams.mark()

    def wait(self, job: Job) -> None:
        """Have the current stream wait for ``job``.

        Raises CommunicationError or InternalError where it could not be given.
        """
        if job.bucket < 0:
            self._host.wait(job)
            return
        self._host.refuse_forked()
        if job.error is None:
            try:
                self._streams.follow(job.event)
            except RuntimeError as error:  # an earlier fault on the device surfaces at any call
                self._fail(job, error)
                job.error = self._host.failure
        job.check()

    def _fail(self, job: Job, error: BaseException) -> None:
        self._host.fail(job, error)
        for group in self._groups:
            torch_private.abort_group(group)

    def stop(self) -> None:
        """Return when all that was given is done, unless something failed."""
        self._host.stop()
        if self._host.failure is None:
            for lane in self._lanes:
                wait_on_host(lane)
