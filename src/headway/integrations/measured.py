"""Once the recorded steps are over: a few seconds in which the ranks of the job measure what plans would cost there.

The recording of stock DDP says what its own collectives took, and nothing of what the decoupled runtime would cost the
same cores, or how messages of other sizes get on. So the job stops between two steps, on all ranks at once, and goes on
as if nothing had been. What a script's own process group cannot bear is left alone: then the recording stands alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from headway import torch_private
from headway.integrations import interruption
from headway.network import halting
from headway.trace.folder import CLUSTER

KEY = "headway/measuring"
MEASURING_PATIENCE_S = 20.0  # with the other ranks' last recorded step
GO, NOT = "go", "not"


def measure(token: str, folder: Path, *, wanted: bool) -> None:
    """Measure the cluster and leave it in rank 0's ``folder``. Every rank calls it after the same step, or none.

    ``wanted`` says whether this rank takes part; unless all do, soon, nobody does. ``token`` names the recording. What
    fails is said in a line, and training goes on. A signal that would end this rank stops the others' measuring too.
    """
    with interruption.postponed(halting.ask), halting.heeded():
        _measure_costs(token, folder, wanted=wanted)


def _measure_costs(token: str, folder: Path, *, wanted: bool) -> None:
    rank = dist.get_rank()
    try:
        if not _all_come(f"{KEY}/{token}", wanted=wanted and _permitted()):
            return
        if rank == 0:
            print(
                "headway: the steps are recorded; now measuring links and cores, for ten seconds to a minute, for "
                "predictions (--no-measuring leaves it out)",
                file=sys.stderr,
                flush=True,
            )
        from headway.measuring.probe import probe_cluster
        from headway.network.collective_costs import SHORT

        with _undisturbed():
            cluster = probe_cluster(effort=SHORT)
        if rank == 0:
            cluster.model_copy(update={"source": "measured after the recording"}).save(folder / CLUSTER)
    except halting.HaltedError:
        return
    except Exception as failure:  # training must not end because something about it could not be measured
        print(f"headway: rank {rank}: links and cores could not be measured: {failure}", file=sys.stderr)


def _permitted() -> bool:
    """Whether collectives of CPU tensors run on the job's default group, as the job's own do."""
    return (
        dist.get_world_size() > 1
        and dist.get_backend() == "gloo"
        and torch.get_default_device().type == "cpu"
        and not torch_private.kept_in_a_file()
    )


def _all_come(key: str, *, wanted: bool) -> bool:
    """Whether every rank wants to and is here in time. All ranks get the same answer: the first that is known."""
    store = torch_private.default_store()
    decision = f"{key}/decision"
    if not wanted:
        store.compare_set(decision, "", NOT)
    elif store.add(f"{key}/come", 1) == dist.get_world_size():
        store.compare_set(decision, "", GO)
    else:
        deadline = time.monotonic() + MEASURING_PATIENCE_S
        while not store.check([decision]) and time.monotonic() < deadline:
            time.sleep(0.01)
        store.compare_set(decision, "", NOT)
    store.wait([decision], timedelta(seconds=MEASURING_PATIENCE_S))
    return bool(store.get(decision).decode() == GO)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Neither the script's random numbers nor its modes are touched, nor do the latter touch what is measured."""
    dtype = torch.get_default_dtype()
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            torch.set_default_dtype(torch.float32)
            yield
    finally:
        torch.set_default_dtype(dtype)
