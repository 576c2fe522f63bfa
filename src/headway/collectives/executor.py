"""The inner loop of the live executor, which runs a chunk program on prepared lists.

A thread that needs the interpreter lock after every message waits for training every time. TorchScript runs this
function without the lock, so a collective takes it once. Without TorchScript, the function runs as plain Python.
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

    Received data is added to ``target[i]`` unless that is empty. Empty tensors are not sent or received. All messages
    carry ``tag``. Receives are posted before sends, because their announcement to the peer should not queue behind a
    payload.

    If ``timed``, returns monotonic times in ns, else an empty list. The times are four per step: receive posted,
    receive done, send posted, send known to have left; 0 without a message.
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
    """``execute`` compiled by TorchScript, or the plain function if that fails."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scripted: Callable[..., list[int]] = torch.jit.script(execute)
    except (RuntimeError, OSError, AttributeError):
        return execute
    return scripted
