"""Which engines are alive in this process, and what has to happen before groups or the interpreter go away."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress

import torch.distributed as dist

from headway import torch_private
from headway.errors import CommunicationError
from headway.strategies.data_parallel.decoupled.clipping import watch_clipping
from headway.strategies.data_parallel.decoupled.engine import Engine
from headway.strategies.data_parallel.decoupled.stepping import watch_optimizers
from headway.strategies.data_parallel.decoupled.unscaling import watch_unscaling

SWITCH_INTERVAL_S = 1e-4
"""How often the interpreter changes threads while an engine lives: at its usual 5 ms messages wait for training."""

_engines: dict[Engine, dist.ProcessGroup] = {}  # engine: the user's process group
_usual_interval_s: float | None = None
_prepared = False
_process = 0


def _here() -> bool:
    """Whether this is the process that trains, and not one forked from it."""
    return os.getpid() == _process


def adopt(engine: Engine, users_group: dist.ProcessGroup) -> None:
    """Keep ``engine`` alive, and finish its work before ``users_group`` or the interpreter ends."""
    global _usual_interval_s, _prepared, _process  # noqa: PLW0603 - the interpreter's settings are global as well
    if not _prepared:
        _prepared = True
        watch_optimizers()
        watch_clipping()
        watch_unscaling()
        torch_private.before_group_shutdown(_before_shutdown)
        atexit.register(_at_exit)
    if not _engines:
        _process = os.getpid()
        _usual_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(min(_usual_interval_s, SWITCH_INTERVAL_S))
    _engines[engine] = users_group


def release(engine: Engine, *, together: bool = True) -> None:
    """Finish the work of ``engine`` and let go of it. Raises CommunicationError where that failed.

    ``together`` says that all ranks do so at this point of their scripts.
    """
    global _usual_interval_s  # noqa: PLW0603 - as above
    if engine not in _engines:
        return
    try:
        engine.close(together=together)
    finally:
        if engine.failed:
            _failed.append(engine)  # its parameters stay deferred and must go on saying why
        _engines.pop(engine, None)
        if not _engines and _usual_interval_s is not None:
            sys.setswitchinterval(_usual_interval_s)
            _usual_interval_s = None


_failed: list[Engine] = []


def abandon(engine: Engine) -> None:
    """The wrapped model was collected: let go of ``engine``, unless this is no moment to wait."""
    on_main_thread = threading.current_thread() is threading.main_thread()
    if engine in _engines and _here() and on_main_thread and not engine.running and not sys.is_finalizing():
        with suppress(CommunicationError):
            release(engine, together=False)


def _before_shutdown(group: dist.ProcessGroup) -> None:
    world = dist.group.WORLD
    for engine, users_group in list(_engines.items()):
        if group in (users_group, *engine.groups.all, world) or users_group is None:
            release(engine)


def _at_exit() -> None:
    """Take part in what peers still wait for, unless this process is ending because something went wrong."""
    if getattr(sys, "last_value", None) is not None or not _here():
        return
    for engine in list(_engines):
        with suppress(CommunicationError):
            release(engine)
