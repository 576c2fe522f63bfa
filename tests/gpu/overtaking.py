"""Faults that the imitated streams must find: each takes one wait out of the runtime, and trains a little."""

from __future__ import annotations

import traceback
from typing import Any

FAULTS = ("collective before gradients", "forward before gather")


def train(_rank: int, _world_size: int, fault: str) -> str:
    """Train with ``fault``; return what was raised."""
    import torch
    from tests.gpu import imitated_streams
    from torch import nn

    from headway.strategies.decoupled import wrapper
    from headway.strategies.live.channels import stream_channels, streams

    imitated_streams.install()
    channels: Any = stream_channels.StreamChannels
    fence: Any = streams.BufferFence
    fence.join = lambda *_: None
    if fault == "forward before gather":
        channels.wait = lambda *_: None
    elif fault == "collective before gradients":
        channels._give = _hasty(channels._give)
    try:
        model = wrapper.DecoupledDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    except BaseException:
        return traceback.format_exc()
    return "nothing was raised"


def _hasty(give: Any) -> Any:
    """A ``_give`` that does not wait for what the current stream has been given."""

    def given(self: Any, job: Any, channel: int) -> None:
        mark, self._streams.mark = self._streams.mark, lambda: None
        try:
            give(self, job, channel)
        finally:
            self._streams.mark = mark
            with self._streams.on(self._lanes[channel]):
                job.event = mark()

    return given


def fill_from_two_streams(_rank: int, _world_size: int) -> list[str]:
    """Fill and read a buffer from several streams, fenced and not; return what was raised."""
    import torch
    from tests.gpu import imitated_streams

    from headway.strategies.live.channels.streams import BufferFence

    imitated_streams.install()
    streams = imitated_streams.Imitated(torch.device("cpu"), True)
    first, second = streams.new(), streams.new()
    outcomes = []
    for ordered in (True, False):
        buffer, fence = torch.zeros(4), BufferFence(streams, on_host=False)
        start = streams.mark()
        outcome = ""
        try:
            for stream, half in ((first, buffer[:2]), (second, buffer[2:]), (0, buffer)):
                with streams.on(stream):
                    streams.follow(start)
                    if ordered:
                        with fence.acquire():
                            half.add_(1)
                    else:
                        half.add_(1)
        except imitated_streams.RaceError as error:
            outcome = str(error)
        outcomes.append(outcome)
    return outcomes
