"""TensorFlow on a processor: operations on threads of the host, collectives over the network; a process is a rank."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from headway.arrays import Ints
from headway.ext import ForeignRank
from headway.trace.format import MAX_WORLD_SIZE
from headway_readers.xplane.assemble import assemble
from headway_readers.xplane.operations import Operations
from headway_readers.xplane.profile import Profile
from headway_readers.xplane.steps import Steps, find_marks

_WORKER = re.compile(r"/job:(?:worker|chief|localhost)/(?:replica:\d+/)?task:(\d{1,6})/")
_SIGNS = ("FunctionRun", "EagerExecute", "EagerKernelExecute", "TFE_Py_Execute", "CollectiveExecutor::")
NO_SIZES = "TensorFlow does not record how much its collectives carry."


def is_tensorflow(profile: Profile) -> bool:
    """Whether TensorFlow ran operations in this profile."""
    return bool(profile.named(*_SIGNS).any())


def worker_of(profile: Profile) -> int | None:
    """The worker's number, by the devices that it calls its own."""
    device, known = profile.value("device")
    tasks: Counter[int] = Counter()
    for name, count in zip(
        *(column.tolist() for column in np.unique(device[known], return_counts=True)), strict=True
    ):
        if found := _WORKER.search(profile.strings[name]):
            tasks[int(found[1])] += count
    return tasks.most_common(1)[0][0] if tasks else None


def clock_of(profile: Profile) -> str:
    """The name of the clock that timed a profile: a host's, where times are of the wall clock."""
    known = profile.absolute and profile.host not in ("", "localhost")
    return f"host {profile.host}" if known else profile.source


def lacks(profile: Profile, tensorflow: bool) -> list[str]:
    """What profiles of devices do not tell."""
    notes = (
        []
        if tensorflow
        else ["JAX does not record when a program waits for its input: such time counts as rest."]
    )
    if not profile.absolute:
        notes.append(
            "Times count from the start of each recording: clocks are related only by what ranks did together."
        )
    return notes


def host_rank(profile: Profile) -> ForeignRank:
    """One process's recording."""
    marks = find_marks(profile)
    operations = Operations(profile, marks)
    steps = marks.steps if marks is not None else _whole(profile, operations.row)
    collectives, replicas = operations.collectives()
    events = assemble(steps, operations.work(), collectives, operations.reading())
    outside = int((collectives.step < 0).sum())
    notes = [*profile.notes, *(marks.notes if marks else ())]
    if marks is None:
        notes.append("Steps are not marked, and no call repeats: everything is taken for one step.")
    if outside:
        notes.append(f"{outside} collectives outside of the steps were left out.")
    if len(collectives) and (collectives.size_bytes < 0).all():
        notes.append(NO_SIZES)
    if replicas > 1:
        notes.append(
            f"Each worker has {replicas} replicas, which TensorFlow does not distinguish: they count as one rank."
        )
    if not len(collectives):
        notes.append("No collective is recorded.")
    worker = worker_of(profile)
    if worker is None:
        notes.append("The profile does not say which worker this is.")
    sizes, known = profile.value("group_size")
    joined = int(sizes[known].max(initial=0)) // max(replicas, 1)
    joined = joined if (worker or 0) < joined <= MAX_WORLD_SIZE else 0
    return ForeignRank(
        source=profile.source,
        framework="tensorflow",
        events=events,
        rank=worker,
        host=profile.host,
        backend="grpc" if any("grpc" in line.name.lower() for line in profile.lines) else "",
        clock=clock_of(profile),
        absolute=profile.absolute,
        groups=_groups(profile, joined, replicas),
        dropped_events=profile.dropped,
        notes=[*notes, *lacks(profile, True)],
    )


def _groups(profile: Profile, world: int, replicas: int) -> dict[str, tuple[int, ...]]:
    """The groups that join all workers, by their keys."""
    (key, keyed), (size, sized) = profile.value("group_key"), profile.value("group_size")
    everybody = keyed & sized & (size == world * max(replicas, 1))
    known = 0 < world <= MAX_WORLD_SIZE
    return {str(one): tuple(range(world)) for one in np.unique(key[everybody]).tolist()} if known else {}


def _whole(profile: Profile, rows: Ints) -> Steps:
    """Everything as one step."""
    rows = rows if len(rows) else np.arange(len(profile))
    return Steps(
        np.zeros(1, dtype=np.int64),
        profile.start_ns[rows].min(keepdims=True),
        profile.end_ns[rows].max(keepdims=True),
    )
