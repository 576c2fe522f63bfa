"""Collectives of a Kineto document: kernels of NCCL and RCCL, and what Gloo says of its own."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.arrays import Indices, Ints, Texts
from headway.interop.readers.kineto.companions import Known, Row
from headway.interop.readers.kineto.document import KinetoDocument
from headway.interop.readers.kineto.entries import Arguments
from headway.interop.readers.kineto.steps import Steps
from headway.interop.readers.torch_json import item_bytes, plain_name
from headway.trace.events import Events, Kind, Stream, texts

_KERNEL = re.compile(r"\b(nccl|rccl|msccl)", re.IGNORECASE)
_RECORD = "record_param_comms"
_ANNOTATION = re.compile(r"^(nccl|gloo|mpi|ucc|xccl):_?(\w+)$")
_IN_KERNEL_NAME = {
    "AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast", "Reduce": "reduce", "SendRecv": "send_receive",
}  # fmt: skip
_MAX_SEQUENCE = 1 << 40
_CALLED_WITHIN = 8  # Gloo's annotation has a record-function id at most this much after its call's
_REDUCING = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True, eq=False)
class Collectives:
    """Columns, one row a collective. ``index`` is the event that spans it, ``asked`` the one that asked for it."""

    index: Indices
    asked: Indices
    rows: list[Row]

    def where(self, mask: npt.NDArray[np.bool_]) -> Collectives:
        """Those that ``mask`` picks."""
        rows = [row for row, wanted in zip(self.rows, mask.tolist(), strict=True) if wanted]
        return Collectives(self.index[mask], self.asked[mask], rows)

    def notes(self) -> list[str]:
        """What has to be said of them."""
        if not self.rows:
            return ["No communication is recorded."]
        notes = []
        unsized = sum(row.size_bytes < 0 for row in self.rows)
        if unsized:
            notes.append(f"{unsized} of {len(self.rows)} collectives do not say how much they carry.")
        return notes


def is_communication(document: KinetoDocument, kernels: Indices) -> npt.NDArray[np.bool_]:
    """Which kernels are communication."""
    return document.called(kernels, lambda name: bool(_KERNEL.search(name)))


def device_collectives(
    document: KinetoDocument, kernels: Indices, launches: Indices, known: Known
) -> Collectives:
    """The communication ``kernels``; ``launches`` has the event that launched each of them, or -1.

    A kernel describes itself since 2024; before, and on ROCm, the call around its launch does, in two different ways.
    """
    calls = _Enclosing(document, np.flatnonzero(document.name == _RECORD))
    annotated = document.of_category("user_annotation", "cpu_op")
    annotated = annotated[document.called(annotated, lambda name: bool(_ANNOTATION.match(name)))]
    annotations = _Enclosing(document, annotated)
    rows = []
    described = zip(
        document.arguments(kernels), launches.tolist(), document.name[kernels].tolist(), strict=True
    )
    for own, launch, name in described:
        row = _described(own)
        if row is None and launch >= 0:
            call = calls.around(launch)
            row = _described(call) or annotations.named_around(launch)
            told = known.of_call(call.record_function)
            row = row.filled_from(told) if row else told
        rows.append(row or Row(_name_in(name)))
    asked = np.where(launches >= 0, launches, kernels)
    return Collectives(kernels, asked, rows)


def host_collectives(document: KinetoDocument, known: Known) -> Collectives:
    """What Gloo's worker threads annotate, with the calls that asked for it."""
    annotated = document.of_category("user_annotation", "cpu_op")
    spans = annotated[document.called(annotated, lambda name: name.startswith("gloo:"))]
    calls = document.of_category("cpu_op")
    calls = calls[document.called(calls, lambda name: name.startswith("c10d::"))]
    call_arguments = document.arguments(calls)
    numbered = sorted(
        (own.record_function, position)
        for position, own in enumerate(call_arguments)
        if isinstance(own.record_function, int)
    )
    ids = [number for number, _ in numbered]
    rows, asked = [], []
    for span, own in zip(spans.tolist(), document.arguments(spans), strict=True):
        row, caller = _of_annotation(document.name[span], own), span
        at = (
            bisect_left(ids, own.record_function) - 1
            if isinstance(own.record_function, int) and own.record_function
            else -1
        )
        if at >= 0 and own.record_function - ids[at] <= _CALLED_WITHIN:
            position = numbered[at][1]
            caller = int(calls[position])
            row = _of_call(document.name[caller], call_arguments[position], _item_bytes(own)).filled_from(row)
            row = row.filled_from(known.of_call(ids[at]))
        rows.append(row)
        asked.append(caller)
    callers = np.array(asked, dtype=np.intp)
    told = known.in_order(document.start_ns[callers], document.end_ns[callers])
    rows = [row.filled_from(more) for row, more in zip(rows, told, strict=True)]
    order = np.argsort(
        document.start_ns[callers], kind="stable"
    )  # threads begin in any order, programs ask in one
    return Collectives(spans[order], callers[order], [rows[position] for position in order.tolist()])


def bucket_numbers(found: Collectives, step: Indices, phase: Texts) -> Ints:
    """The bucket that each collective of ``step`` (indices), asked for in ``phase``, carries; -1 for none.

    What a backward reduces are gradients: such collectives are numbered as buckets, in each step.
    """
    buckets: dict[int, int] = {}
    numbers = []
    for row, one, part in zip(found.rows, step.tolist(), phase.tolist(), strict=True):
        carries = part == Kind.BACKWARD and row.name in _REDUCING
        numbers.append(buckets.get(one, 0) if carries else -1)
        buckets[one] = buckets.get(one, 0) + carries
    return np.array(numbers, dtype=np.int64)


def collective_events(
    document: KinetoDocument, found: Collectives, steps: Steps, step: Indices, bucket: Ints
) -> Events:
    """Events of collectives that lie in ``step`` (indices) and carry ``bucket``."""
    messages = {"send": Kind.SEND, "receive": Kind.RECEIVE}
    on_device = document.of_device(found.index)
    start_ns = document.start_ns[found.index]
    # A kernel waits for its members on the device; Gloo's call waits in a queue for a thread.
    enqueue_ns = np.where(on_device, start_ns, np.minimum(document.start_ns[found.asked], start_ns))
    return Events.from_columns(
        kind=texts([messages.get(row.name, Kind.COLLECTIVE) for row in found.rows]),
        name=texts([row.name for row in found.rows]),
        stream=Stream.COMMUNICATION,
        step=steps.number[step],
        start_ns=start_ns,
        duration_ns=document.duration_ns[found.index],
        enqueue_ns=enqueue_ns,
        group=texts([row.group for row in found.rows]),
        sequence=np.array([row.sequence for row in found.rows], dtype=np.int64),
        size_bytes=np.array([row.size_bytes for row in found.rows], dtype=np.int64),
        bucket=bucket,
        peer=np.array([row.peer for row in found.rows], dtype=np.int64),
        algorithm=texts([str(name)[:80] for name in document.name[found.index].tolist()]),
    )


def _described(own: Arguments) -> Row | None:
    if not isinstance(own.collective, str):
        return None
    name = plain_name(own.collective)
    numels = [
        value for value in (own.in_numel, own.out_numel) if isinstance(value, int) and 0 <= value < 2**48
    ]
    size = item_bytes(own.dtype)
    size_bytes = max(numels) * size if numels and size > 0 else -1
    peer = own.target if name == "send" else own.source if name == "receive" else -1
    return Row(
        name[:60], _text(own.group), _small(own.sequence, _MAX_SEQUENCE), size_bytes, _small(peer, 2**31)
    )


def _of_annotation(name: str, own: Arguments) -> Row:
    """What a backend annotates: it knows the inputs, which are one member's share where a group gathers."""
    found = _ANNOTATION.match(name)
    plain = plain_name(found[2] if found else name)[:60]
    return Row(plain, size_bytes=-1 if plain in ("all_gather", "gather") else _largest_bytes(own))


def _of_call(name: str, own: Arguments, element_bytes: int) -> Row:
    """A ``c10d::`` operator: the whole tensor is its largest argument. ``element_bytes`` is for lists of tensors."""
    plain = plain_name(name.removeprefix("c10d::"))[:60]
    peer = -1
    if plain in ("send", "receive") and isinstance(own.concrete, list) and len(own.concrete) > 2:
        peer = _small(own.concrete[2], 2**31)
    return Row(plain, size_bytes=_largest_bytes(own, element_bytes or 4), peer=peer)


def _item_bytes(own: Arguments) -> int:
    """The size of an element of the first input whose type is one of elements; 0 where there is none."""
    kinds = own.types if isinstance(own.types, list) else []
    plain = (str(kind).lower().removeprefix("c10::") for kind in kinds)
    return next((size for size in map(item_bytes, plain) if size > 0), 0)


def _largest_bytes(own: Arguments, in_lists_bytes: int = 4) -> int:
    """The size of the largest tensor, or list of tensors, among the inputs; -1 where shapes are not recorded.

    Of tensors in lists the type is not told: their elements take ``in_lists_bytes``.
    """
    if not isinstance(own.dims, list) or not isinstance(own.types, list):
        return -1
    item_bytes = _item_bytes(own) or (in_lists_bytes if "TensorList" in own.types else 0)
    try:
        numel = max((_numel(dims) for dims in own.dims), default=0)
    except (TypeError, LookupError, ArithmeticError, RecursionError):
        return -1
    return int(numel) * item_bytes if item_bytes and 0 < numel < 2**48 else -1


def _numel(dims: Any) -> int:
    """Of a tensor's shape, or of a list of shapes."""
    if not dims:
        return 0
    if isinstance(dims[0], list):
        return sum(_numel(one) for one in dims)
    return math.prod(dims)


def _small(value: Any, limit: int) -> int:
    """``value`` where it is a number from 0 to ``limit``; -1 otherwise."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    return value if isinstance(value, int) and 0 <= value < limit else -1


def _text(value: Any) -> str:
    return str(value)[:200] if value is not None else ""


def _name_in(kernel: str) -> str:
    return next((name for part, name in _IN_KERNEL_NAME.items() if f"_{part}" in kernel), "collective")


class _Enclosing:
    """Which of some spans a moment of a thread lies in."""

    def __init__(self, document: KinetoDocument, indices: Indices) -> None:
        self._document = document
        self._of_thread: dict[int, Indices] = {}
        threads = document.threads(indices)
        for thread in np.unique(threads).tolist():
            self._of_thread[thread] = indices[threads == thread]

    def _index(self, event: int) -> int:
        indices = self._of_thread.get(int(self._document.threads(np.array([event]))[0]))
        if indices is None:
            return -1
        start_ns = self._document.start_ns
        position = int(np.searchsorted(start_ns[indices], start_ns[event], side="right")) - 1
        if position < 0:
            return -1
        found = int(indices[position])
        return found if start_ns[event] < start_ns[found] + self._document.duration_ns[found] else -1

    def around(self, event: int) -> Arguments:
        """The arguments of the span around ``event``, which are empty where there is none."""
        found = self._index(event)
        return Arguments() if found < 0 else self._document.arguments(np.array([found]))[0]

    def named_around(self, event: int) -> Row | None:
        """What the annotation around ``event`` says, where there is one."""
        found = self._index(event)
        if found < 0:
            return None
        return _of_annotation(self._document.name[found], self._document.arguments(np.array([found]))[0])
