"""Activates Headway inside a user's process: once it is a rank, installs the recorder and the plan.

A process becomes a rank when its default process group is initialised. It reports its rank and any refusals to its
launcher (``reports``). Processes started by a rank may train in process groups of their own, as evaluations do: these
are ignored.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

from headway.errors import HeadwayError, UserError
from headway.integrations import reports
from headway.integrations.launch import PLAN_VARIABLE, RECORD_VARIABLE, TIME_VARIABLE

STEPS_ALONE = 3  # by an optimizer without a process group, before a process is reported as training alone
REFUSED_KEY = "headway/refused"  # in the job's store, for the launchers of other hosts


def on_torch_import(_torch: Any) -> None:
    """Patch ``torch.distributed`` as the environment asks. Called once, after torch is imported."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    if reports.is_started_by_rank():
        _call_when_a_rank(functools.partial(_leave_alone, set()))
        return
    from headway import torch_private
    from headway.strategies.live import reads

    reads.install()  # before scripts import what it replaces by name
    reports.update()
    _end_cleanly_on_own_errors()
    torch_private.let_gloo_finish_before_shutdown()
    forget = _notice_training_alone()
    _call_when_a_rank(functools.partial(_activate, set(), forget))


def _activate(done: set[int], not_alone: Callable[[], None]) -> None:
    """Make this process, which has just become a rank, record or follow the plan; once per process."""
    import torch.distributed as dist

    if os.getpid() in done:
        return
    not_alone()
    if reports.is_started_by_rank():  # forked by one
        _leave_alone(done)
        return
    done.add(os.getpid())
    os.environ[reports.RANK_VARIABLE] = str(os.getpid())
    reports.update(rank=dist.get_rank(), world_size=dist.get_world_size(), alone=False)
    plan_path = os.environ.get(PLAN_VARIABLE)
    record_options = os.environ.get(RECORD_VARIABLE)
    try:
        if plan_path:
            from headway.integrations.planned import follow

            follow(plan_path)
        if record_options:
            from headway.integrations.recorded import begin

            begin(record_options)
        if time_options := os.environ.get(TIME_VARIABLE):
            from headway.integrations.timed import time_this_rank

            time_this_rank(time_options)
    except UserError as error:
        leave_refusal(error)
        raise error.with_traceback(None) from None


def _leave_alone(done: set[int]) -> None:
    """Ignore the process group of a process that a rank started, and say so once per process."""
    import torch.distributed as dist

    if os.getpid() in done:
        return
    done.add(os.getpid())
    planned = sys.modules.get("headway.integrations.plan_injection")
    if planned is not None:
        planned.uninstall()
    if dist.get_rank() == 0:
        above, size = os.environ[reports.RANK_VARIABLE], dist.get_world_size()
        print(
            f"headway: ignoring a process group of {size} {'rank' if size == 1 else 'ranks'}: it was started by rank "
            f"process {above} and is not the job's",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def _call_when_a_rank(became: Callable[[], None]) -> None:
    """Call ``became`` after every initialisation of the default group, wherever torch's own modules call it from."""
    import torch.distributed as dist

    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if dist.is_initialized():
            became()
        return result

    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed") and vars(module).get("init_process_group") is original:
            module.init_process_group = init_process_group  # type: ignore[attr-defined]


def _notice_training_alone() -> Callable[[], None]:
    """Report when an optimizer steps several times without a process group; returns a function that ends this."""
    from headway.torch_private.optimizers import after_every_step

    steps = 0

    def stepped(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == STEPS_ALONE:
            reports.update(alone=True)

    handle = after_every_step(stepped)
    return handle.remove


def leave_refusal(error: UserError) -> bool:
    """Report one of Headway's errors to the job's launchers; returns whether this host's launcher will show it."""
    from headway import torch_private

    first = reports.reported("refused") or str(error)  # later errors are consequences
    is_heard = reports.update(refused=first)
    with contextlib.suppress(Exception):  # there is no group, or the rank that kept the store is gone
        if not torch_private.uses_file_store():
            torch_private.default_store(torch_private.SHORT_LIMIT_S).set(REFUSED_KEY, str(error))
    return is_heard


def _end_cleanly_on_own_errors() -> None:
    """Report Headway's errors to the launcher, which prints them as its last line, instead of a traceback here.

    The script's own excepthook is still called; an error that it hides is reported at exit.
    """
    import atexit

    before: Callable[..., Any] = sys.excepthook

    @functools.wraps(before)
    def show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        refusal = _refusal_behind(error)
        is_heard = refusal is not None and leave_refusal(refusal)
        if not isinstance(error, HeadwayError):
            before(kind, error, trace)
        elif not is_heard:
            rank = reports.reported("rank")
            where = f"rank {rank}: " if rank is not None and not str(error).startswith("rank ") else ""
            print(f"headway: {where}{error}", file=sys.stderr, flush=True)
        if refusal is None:
            _look_for_a_peers_refusal()

    def at_exit() -> None:
        refusal = _refusal_behind(getattr(sys, "last_value", None))
        if refusal is not None and not reports.reported("refused"):
            leave_refusal(refusal)
        if multiprocessing.parent_process() is not None:  # data loaders start many that never are ranks
            reports.withdraw()

    sys.excepthook = show
    atexit.register(at_exit)


def _refusal_behind(error: BaseException | None) -> UserError | None:
    """The UserError that ``error`` is or was raised from, or None."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, UserError):
            return error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _look_for_a_peers_refusal() -> None:
    """If another rank refused, report its reason: this rank fails only because that one is missing."""
    from headway import torch_private

    with contextlib.suppress(Exception):  # there is no group, or the rank that kept the store is gone
        if os.environ.get(PLAN_VARIABLE) and not torch_private.uses_file_store():
            store = torch_private.default_store(torch_private.SHORT_LIMIT_S)
            if store.check([REFUSED_KEY]):
                reports.update(refused=store.get(REFUSED_KEY).decode(errors="replace"))
