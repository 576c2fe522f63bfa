"""Reads ``torch.profiler`` exports (Kineto) of NCCL, RCCL and Gloo jobs, since 2022."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

from headway.arrays import Indices
from headway.errors import TraceError
from headway.interop.readers.foreign import Companion, Document, ForeignRank, Reading
from headway.interop.readers.kineto import steps
from headway.interop.readers.kineto.companions import RankCompanions
from headway.interop.readers.kineto.device import device_events, host_events
from headway.interop.readers.kineto.document import DEVICE, Head, KinetoDocument, no_collections, parse
from headway.interop.readers.kineto.steps import steps_of
from headway.interop.readers.ranks import rank_in_name

_OWN_KEYS = (b'"schemaVersion"', b'"deviceProperties"', b'"distributedInfo"', b'"baseTimeNanoseconds"')
_OWN_EVENTS = (
    b'"cpu_op"',
    b'"user_annotation"',
    b'"cuda_runtime"',
    b'"kernel"',
    b'"gpu_memcpy"',
    b'"Operator"',
)
_WORKER = re.compile(r"^(?P<host>[A-Za-z][\w.\-]*?)_\d+\.\d+\.pt\.trace\.json")


def recognises(name: str, head: bytes) -> bool:
    """Whether a document is Kineto's, judged by the keys around its events or by their categories."""
    start = head.lstrip()[:1]
    if start == b"{" and any(key in head for key in _OWN_KEYS):
        return True
    return start in (b"{", b"[") and any(category in head for category in _OWN_EVENTS) and b'"ph"' in head


def read(document: Document, companions: Sequence[Companion] = ()) -> Reading:
    """Read a document of one rank, or of merged ranks; ``companions`` may add details of collectives.

    Raises TraceError if it is damaged or contains no operators or kernels.
    """
    with no_collections():
        kineto = parse(document)
        if not len(kineto):
            raise TraceError(
                f"{document.name} contains no operators and no kernels",
                expected="a recording of torch.profiler",
                fix="Record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA].",
            )
        processes = kineto.processes() if len(_pids(kineto)) > 1 else {}
        if len(processes) > 1:
            return Reading(ranks=_split(document, kineto, processes, companions))
        if len(pids := _pids(kineto)) > 1:
            raise TraceError(
                f"{document.name} mixes several processes without labels",
                got=f"processes {', '.join(sorted(pids)[:4])}",
                expected="one document per rank",
                fix="Import the original documents instead of the merged one.",
            )
        return Reading(ranks=[_rank(document, kineto, companions)])


def _pids(kineto: KinetoDocument) -> set[str]:
    """The processes with step marks, or else with operators."""
    marks = steps.named(kineto, "ProfilerStep")
    marks = marks if len(marks) else kineto.of_category("cpu_op", "Operator")
    pids = (entry.pid for entry in kineto.entries[marks].tolist())
    return {str(pid)[:100] for pid in {pid if isinstance(pid, (str, int)) else str(pid) for pid in pids}}


def _split(
    document: Document,
    kineto: KinetoDocument,
    processes: Mapping[str, Indices],
    companions: Sequence[Companion],
) -> list[ForeignRank]:
    """The ranks of a merged document, numbered by their labels, or else in the order of the labels."""
    ranks = []
    stated = [rank_in_name(label) for label in processes]
    numbered = len(set(stated)) == len(stated) and None not in stated
    for place, (label, rows) in enumerate(processes.items()):
        rank = stated[place] if numbered else place
        recording = _rank(
            replace(document, name=f"{document.name} [{label}]"), kineto.where(rows), companions, rank
        )
        if not numbered:
            recording.notes.append(
                "The document contains several ranks, which are numbered in the order of their labels."
            )
        ranks.append(recording)
    return ranks


def _rank(
    document: Document, kineto: KinetoDocument, companions: Sequence[Companion], merged_as: int | None = None
) -> ForeignRank:
    steps = steps_of(kineto)
    info = kineto.head.distributed
    rank = merged_as
    if rank is None:
        rank = info.rank if isinstance(info.rank, int) else rank_in_name(document.name)
    rank_companions = RankCompanions.of_rank(rank, companions)
    make = device_events if len(kineto.of_category(*DEVICE)) else host_events
    events, notes = make(kineto, steps, rank_companions)
    if not steps.stated:
        notes.append("Steps are not marked (profiler.step() was not called): everything counts as one step.")
    return ForeignRank(
        source=document.name,
        framework="pytorch",
        events=events,
        rank=rank,
        world_size=info.world_size if isinstance(info.world_size, int) and info.world_size > 0 else None,
        host=str(kineto.head.host)[:200] or _host(document.name),
        backend=str(info.backend or "")[:40],
        absolute=True,
        on_device=make is device_events,
        device=kineto.head.device if make is device_events else "",
        groups={**_groups(kineto.head), **rank_companions.groups},
        dropped_events=kineto.dropped,
        notes=[*_clock_notes(kineto), *kineto.notes, *notes],
    )


def _host(name: str) -> str:
    """The host in the file name, as torch's own trace handler writes it."""
    match = _WORKER.match(PurePath(name.replace(":", "/")).name)
    return match["host"] if match else ""


def _groups(head: Head) -> dict[str, tuple[int, ...]]:
    groups = {}
    for group in head.distributed.pg_config:
        if isinstance(group.name, str) and isinstance(group.ranks, list):
            members = tuple(rank for rank in group.ranks if isinstance(rank, int))
            if members:
                groups[group.name[:200]] = members
    return groups


def _clock_notes(kineto: KinetoDocument) -> list[str]:
    if not kineto.head.base_ns and kineto.start_ns[-1] < 10**18:
        return ["The origin of times is not recorded: clocks were aligned by causality alone."]
    return []
