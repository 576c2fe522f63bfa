"""Inside a rank of somebody's command: put the recorder and the plan in place once torch is imported."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.errors import HeadwayError, UserError
from headway.integrations.launch import ERRORS_VARIABLE, PLAN_VARIABLE, RECORD_VARIABLE


def on_torch_import(_torch: Any) -> None:
    """Patch ``torch.distributed`` for what the environment asks. Called once, when torch has been imported."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    _end_cleanly_on_own_errors()
    _let_gloo_finish_before_groups_go()
    plan_path = os.environ.get(PLAN_VARIABLE)
    record_options = os.environ.get(RECORD_VARIABLE)
    if plan_path or record_options:
        from headway.strategies.data_parallel import reads

        reads.install()  # before scripts import what it replaces by name
    if plan_path:
        from headway.integrations.plan_injection import install
        from headway.plan import Plan

        install(Plan.load(plan_path))
    if record_options:
        from headway.trace.record.attach import record_from_first_group
        from headway.trace.record.recorder import RecordOptions

        record_from_first_group(RecordOptions.model_validate_json(record_options))


def _let_gloo_finish_before_groups_go() -> None:
    import torch.distributed as dist

    from headway import torch_private

    original = dist.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        torch_private.let_gloo_finish()
        return original(*args, **kwargs)

    dist.destroy_process_group = destroy_process_group
    dist.distributed_c10d.destroy_process_group = destroy_process_group


def _end_cleanly_on_own_errors() -> None:
    """Show Headway's own errors as one line instead of a traceback of its insides, and leave them for the launcher."""
    before: Callable[..., Any] = sys.excepthook

    @functools.wraps(before)
    def show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if not isinstance(error, HeadwayError):
            before(kind, error, trace)
            return
        rank = os.environ.get("RANK", "0")
        print(f"headway: rank {rank}: {error}", file=sys.stderr, flush=True)
        folder = os.environ.get(ERRORS_VARIABLE)
        if folder and isinstance(error, UserError):
            with contextlib.suppress(OSError):
                (Path(folder) / f"rank-{rank.zfill(5)}").write_text(str(error), encoding="utf-8")

    sys.excepthook = show
