"""The loop of the live executor: what ``collectives.program`` says, on prepared lists.

A thread concurrent with training that asks for the interpreter after every message waits for it every time.
TorchScript runs this very function without the interpreter, so a collective asks for it once. Where TorchScript is not
to be had, the function runs as the Python that it is.
"""

import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Callable, List  # noqa: UP035 - TorchScript knows these names

import torch

if TYPE_CHECKING:
    BoxedGroup = Any
    BoxedWork = Any
else:
    BoxedGroup = torch.classes.c10d.ProcessGroup
    BoxedWork = torch.classes.c10d.Work


def execute(
    sends: BoxedGroup,
    receives: BoxedGroup,
    outgoing: List[torch.Tensor],  # noqa: UP006
    send_to: List[int],  # noqa: UP006
    send_after: List[int],  # noqa: UP006
    landing: List[torch.Tensor],  # noqa: UP006
    receive_from: List[int],  # noqa: UP006
    target: List[torch.Tensor],  # noqa: UP006
    lookahead: int,
    tag: int,
    timed: bool,
) -> List[int]:  # noqa: UP006
    """Run a program whose step ``i`` sends ``outgoing[i]`` and receives into ``landing[i]``.

    What has landed is added to ``target[i]`` unless that is empty. Empty tensors are neither sent nor received. All
    messages carry ``tag``. A receive is posted before any send of its time: the peer is told of it by a message, which
    should not have to queue behind a payload.

    Returns nothing, or where ``timed``, monotonic times in ns: of each step, when its receive was posted, when that
    was done, when its send was posted, and when that was known to have left; 0 where there was none.
    """
    count = len(outgoing)
    times: List[int] = [0] * (4 * count if timed else 0)  # noqa: UP006
    senders: List[int] = []  # noqa: UP006
    receiving: List[BoxedWork] = []  # noqa: UP006
    sending: List[BoxedWork] = []  # noqa: UP006
    posted = 0
    sent = 0
    awaited = 0
    for done in range(-1, count):
        if done >= 0 and landing[done].numel() > 0:
            receiving[awaited].wait()
            awaited += 1
            if timed:
                times[count + done] = torch.ops.prim.TimePoint()
            if target[done].numel() > 0:
                target[done].add_(landing[done])
        while posted < count and posted <= done + lookahead:
            if landing[posted].numel() > 0:
                if timed:
                    times[posted] = torch.ops.prim.TimePoint()
                receiving.append(torch.ops.c10d.recv_([landing[posted]], receives, receive_from[posted], tag))
            posted += 1
        while sent < count and send_after[sent] <= done:
            if outgoing[sent].numel() > 0:
                if timed:
                    times[2 * count + sent] = torch.ops.prim.TimePoint()
                    senders.append(sent)
                sending.append(torch.ops.c10d.send([outgoing[sent]], sends, send_to[sent], tag))
            sent += 1
    for number in range(len(sending)):
        sending[number].wait()
        if timed:
            times[3 * count + senders[number]] = torch.ops.prim.TimePoint()
    return times


@lru_cache(maxsize=1)
def compiled() -> Callable[..., List[int]]:  # noqa: UP006
    """``execute`` as it runs without the interpreter, or itself where it cannot."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scripted: Callable[..., list[int]] = torch.jit.script(execute)
    except (RuntimeError, OSError, AttributeError):
        return execute
    return scripted
