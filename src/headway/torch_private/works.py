"""Works: what asynchronous communication returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def source_of(work: dist.Work) -> int:
    """Which member of its group sent what the finished ``work`` received from anybody."""
    return int(work._source_rank())


def when_work_completes(boxed: Any, callback: Callable[[], None]) -> None:
    """Call ``callback`` when a boxed work is done, on whichever thread completes it."""
    dist.Work.unbox(boxed).get_future().then(lambda _: callback())


def wait_for_work(boxed: Any) -> None:
    """Return when a boxed work is done."""
    dist.Work.unbox(boxed).wait()
