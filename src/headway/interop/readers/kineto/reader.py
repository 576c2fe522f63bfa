"""PyTorch's Kineto: what ``torch.profiler`` exports, from NCCL, RCCL and Gloo jobs, since 2022."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from headway.errors import TraceError
from headway.interop.readers.foreign import Companion, Document, ForeignRank, Reading
from headway.interop.readers.kineto.companions import Known
from headway.interop.readers.kineto.device import device_events
from headway.interop.readers.kineto.document import DEVICE, KinetoDocument, no_collections, parse
from headway.interop.readers.kineto.entries import Head
from headway.interop.readers.kineto.host import host_events
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
    """Whether a document is Kineto's: by the keys around its events, or by their categories."""
    start = head.lstrip()[:1]
    if start == b"{" and any(key in head for key in _OWN_KEYS):
        return True
    return start in (b"{", b"[") and any(own in head for own in _OWN_EVENTS) and b'"ph"' in head


def read(document: Document, companions: Sequence[Companion] = ()) -> Reading:
    """Read one rank's document; ``companions`` may say what it leaves out of its collectives.

    Raises TraceError where it is damaged, or holds nothing that takes time.
    """
    with no_collections():
        return Reading(ranks=[_rank(document, companions)])


def _rank(document: Document, companions: Sequence[Companion]) -> ForeignRank:
    found = parse(document)
    if not len(found):
        raise TraceError(
            f"{document.name} holds no operators and no kernels",
            expected="a recording of torch.profiler",
            fix="Record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA].",
        )
    steps = steps_of(found)
    info = found.head.distributed
    rank = info.rank if isinstance(info.rank, int) else rank_in_name(document.name)
    known = Known.of_rank(rank, companions)
    make = device_events if len(found.of_category(*DEVICE)) else host_events
    events, notes = make(found, steps, known)
    if not steps.stated:
        notes.append(
            "Nothing marks steps (profiler.step() was not called): everything is taken for one step."
        )
    return ForeignRank(
        source=document.name,
        framework="pytorch",
        events=events,
        rank=rank,
        world_size=info.world_size if isinstance(info.world_size, int) and info.world_size > 0 else None,
        host=str(found.head.host)[:200] or _host(document.name),
        backend=str(info.backend or "")[:40],
        absolute=True,
        groups={**_groups(found.head), **known.groups},
        dropped_events=found.dropped,
        notes=[*_whole(found), *found.notes, *notes],
    )


def _host(name: str) -> str:
    """The host that the profiler's own handler puts into the names of its files."""
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


def _whole(found: KinetoDocument) -> list[str]:
    if not found.head.base_ns and found.start_ns[-1] < 10**18:
        return ["Times do not count from a stated moment: clocks are told apart by causality alone."]
    return []
