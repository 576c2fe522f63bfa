"""Which engines are alive in this process, and what has to happen before groups or the interpreter go away."""

from __future__ import annotations

import atexit
import os
import sys
import time
from contextlib import suppress

import torch.distributed as dist

from headway import torch_private
from headway.errors import CommunicationError, InternalError
from headway.strategies.decoupled.engine import Engine
from headway.strategies.decoupled.stepping import watch_clipping, watch_optimizers, watch_unscaling
from headway.strategies.live.channels import retirement
from headway.strategies.live.channels.communication import await_blocked

SWITCH_INTERVAL_S = 1e-4
"""How often the interpreter changes threads while an engine lives: at its usual 5 ms messages wait for training."""

LAST_STEP_S = 5.0
"""How long a process that ends with an error takes part in the collectives of the step before."""

TO_SAVE_S = 2.0
"""How long it stays then, so that other ranks can save what they have."""

LONGEST_STAY_S = 60.0
"""How long a process that has come to its end answers others that have not."""

_engines: dict[Engine, dist.ProcessGroup] = {}  # engine: the user's process group
_aside: set[Engine] = set()  # those that do nothing at the moment
_usual_interval_s: float | None = None
_prepared = False
_process = 0


def _here() -> bool:
    """Whether this is the process that trains, and not one forked from it."""
    return os.getpid() == _process


def adopt(engine: Engine, users_group: dist.ProcessGroup) -> None:
    """Keep ``engine`` alive, and finish its work before ``users_group`` or the interpreter ends."""
    global _prepared, _process  # noqa: PLW0603 - what is watched is the process's too
    if not _prepared:
        _prepared = True
        watch_optimizers()
        watch_clipping()
        watch_unscaling()
        torch_private.before_group_shutdown(_before_shutdown)
        atexit.register(_at_exit)
    retirement.end_unused()  # by now every rank has let go of what it wrapped before
    if not _engines:
        _process = os.getpid()
    _engines[engine] = users_group
    _choose_switch_interval()


def set_aside(engine: Engine, *, aside: bool) -> None:
    """Say whether ``engine`` does nothing for the time being: then the interpreter is as it was without it."""
    (_aside.add if aside else _aside.discard)(engine)
    _choose_switch_interval()


def _choose_switch_interval() -> None:
    global _usual_interval_s  # noqa: PLW0603 - the interpreter's settings are global as well
    wanted = bool(_engines.keys() - _aside)
    if wanted and _usual_interval_s is None:
        _usual_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(min(_usual_interval_s, SWITCH_INTERVAL_S))
    elif not wanted and _usual_interval_s is not None:
        sys.setswitchinterval(_usual_interval_s)
        _usual_interval_s = None


def release(engine: Engine, *, together: bool = True, exiting: bool = False) -> None:
    """Finish the work of ``engine`` and let go of it. Raises CommunicationError or InternalError where that failed.

    ``together`` says that all ranks do so at this point of their scripts, ``exiting`` that the process ends.
    """
    if engine not in _engines:
        return
    try:
        engine.close(together=together, exiting=exiting)
    finally:
        if engine.failed:
            _failed.append(engine)  # its parameters stay deferred and must go on saying why
        _engines.pop(engine, None)
        _aside.discard(engine)
        _choose_switch_interval()


def give_up(engine: Engine) -> int:
    """Let go of ``engine``, which has failed; returns how many steps its parameters are behind."""
    missing = engine.give_up()
    _engines.pop(engine, None)
    if engine in _failed:
        _failed.remove(engine)
    _aside.discard(engine)
    _choose_switch_interval()
    return missing


def release_everywhere(engine: Engine) -> None:
    """Let go of ``engine`` on all ranks, which call it together, and give back all that it had."""
    users_group = _engines[engine]
    release(engine)
    dist.barrier(group=users_group)
    engine.disconnect()


_failed: list[Engine] = []


def abandon(engine: Engine) -> None:
    """The wrapped model was collected: let go of ``engine``, on a thread that may wait."""
    if engine not in _engines or engine.running or not _here() or sys.is_finalizing():
        return
    with suppress(CommunicationError, InternalError):
        release(engine, together=False)
    if not engine.failed:
        retirement.retire(_Abandoned(engine))


class _Abandoned:
    """An engine whose wrapped model is gone: it answers peers, and asks them for what is looked at."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def leave(self, *, exiting: bool = False) -> None:
        """Tell the other ranks that this one will ask nothing more, unless an optimizer's state is still spread."""
        if exiting or not self._engine.settlement.form.states_left:
            self._engine.peers.gone()

    def everyone_left(self, timeout_s: float = 0.0) -> bool:
        """Whether no rank will ask anything more."""
        return self._engine.peers.all_gone(timeout_s)

    def end(self) -> None:
        """Give back connections and buckets."""
        self._engine.disconnect()


def _before_shutdown(group: dist.ProcessGroup) -> None:
    world = dist.group.WORLD
    for engine, users_group in list(_engines.items()):
        if group in (users_group, *engine.groups.all, world) or users_group is None:
            release(engine)
            if group is users_group and group is not world and not engine.failed:
                engine.disconnect()  # nobody else destroys what was made for it


def _at_exit() -> None:
    """Take part in what peers still wait for; where an error ends this process, only in what is queued.

    So peers have the last step whole, and can save it. Otherwise stay for a while, in case that they have questions: a
    rank may be saving what is spread over all.
    """
    if not _here():
        return
    for engine in _engines:
        engine.peers.script_ends()
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is not None:
        deadline = time.monotonic() + LAST_STEP_S
        left = [engine for engine in _engines if not engine.failed]
        for engine in left:
            engine.transport.finish_queued(deadline)
            engine.peers.script_fails(error)
            engine.transport.abort()
        if left:  # launchers kill all ranks as soon as one has ended, and these may be saving
            time.sleep(TO_SAVE_S)
        return
    left = [engine for engine in _engines if not engine.failed]
    for engine in list(_engines):
        with suppress(Exception):
            engine.settlement.settle_values()
    for engine in _engines:
        engine.peers.gone()
    retirement.leave_all()
    deadline = time.monotonic() + LONGEST_STAY_S
    for engine in (each for each in left if not each.failed):
        engine.peers.all_gone(max(0.0, deadline - time.monotonic()))
    retirement.wait_for_everyone(deadline)
    for engine in list(_engines):
        with suppress(Exception):
            release(engine, together=False, exiting=True)
    await_blocked()
