"""A rank under ``headway record``: where its file goes, when its launcher learns of it, and what ends it early."""

from __future__ import annotations

import functools
import sys

import torch.distributed as dist

from headway import torch_private
from headway.errors import UserError, one_line
from headway.integrations import interruption, measured, reports
from headway.recording import collecting
from headway.recording.attach import record_this_rank
from headway.recording.place import Place, agree_on_place
from headway.recording.recorder import PATIENCE_WHEN_FAILED_S, Recorder, RecordOptions

PATIENCE_S = 60.0  # with one piece of a file


def begin(options_json: str) -> None:
    """Record this rank, whose default process group stands, under ``RecordOptions`` given as JSON.

    Where that cannot begin, one line says so and the job goes on.
    """
    try:
        _begin(RecordOptions.model_validate_json(options_json))
    except UserError:
        raise
    except Exception as failure:
        rank, why = dist.get_rank(), one_line(f"{type(failure).__name__}: {failure}")
        print(f"headway: rank {rank} cannot be recorded: {why}; the job goes on", file=sys.stderr, flush=True)


def _begin(options: RecordOptions) -> None:
    place = agree_on_place(options.folder, options.output)
    reports.say(records=True)
    recorder = record_this_rank(options.model_copy(update={"folder": place.folder}))
    recorder.when_written(functools.partial(_bring_together, recorder, place, dist.get_rank()))
    recorder.when_written(functools.partial(reports.say, done=True))
    interruption.call_first(recorder)
    # Last: by then signals are nobody's but the script's again.
    recorder.when_written(functools.partial(_measure, recorder, place))


def _measure(recorder: Recorder, place: Place) -> None:
    if recorder.options.measure and recorder.saw_every_step and dist.is_initialized():
        wanted = recorder.may_be_measured and recorder.options.detail != "kernels"
        measured.measure(place.recording.token, place.folder, wanted=wanted)


def _bring_together(recorder: Recorder, place: Place, rank: int) -> None:
    """Send this rank's file to rank 0 where that does not see it, or on rank 0 receive what is sent."""
    if not dist.is_initialized() or torch_private.kept_in_a_file():
        return
    patience_s = PATIENCE_S if recorder.in_order else PATIENCE_WHEN_FAILED_S
    token = place.recording.token
    try:
        if rank == 0:
            collecting.receive(token, place.folder, patience_s)
        elif not place.shared:
            collecting.send(token, rank, place.folder, patience_s)
    except Exception as failure:  # training must not end because its recording does
        print(f"headway: rank {rank}'s recording could not be sent to rank 0: {failure}", file=sys.stderr)
