"""Inside a rank of somebody's command: put the recorder and the plan in place once torch is imported."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from headway.errors import HeadwayError
from headway.integrations.launch import PLAN_VARIABLE, RECORD_VARIABLE

USER_ERROR_STATUS = 2


def on_torch_import(_torch: Any) -> None:
    """Patch ``torch.distributed`` for what the environment asks. Called once, when torch has been imported."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    _end_cleanly_on_own_errors()
    plan_path = os.environ.get(PLAN_VARIABLE)
    record_options = os.environ.get(RECORD_VARIABLE)
    if plan_path:
        from headway.integrations.plan_injection import install
        from headway.plan import Plan

        install(Plan.load(plan_path))
    if record_options:
        from headway.trace.record.attach import record_from_first_group
        from headway.trace.record.recorder import RecordOptions

        record_from_first_group(RecordOptions.model_validate_json(record_options))


def _end_cleanly_on_own_errors() -> None:
    """Show Headway's own errors as one line and exit with status 2, instead of a traceback of its insides."""
    before: Callable[..., Any] = sys.excepthook

    @functools.wraps(before)
    def show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, HeadwayError):
            print(f"headway: rank {os.environ.get('RANK', '?')}: {error}", file=sys.stderr, flush=True)
        else:
            before(kind, error, trace)

    sys.excepthook = show
