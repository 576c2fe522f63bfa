"""Finds the collectives of a Kineto document: NCCL and RCCL kernels, and Gloo's annotations."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headway import intervals
from headway.arrays import Indices, Ints, Texts
from headway.interop.readers.kineto.companions import RankCompanions, Row
from headway.interop.readers.kineto.document import Arguments, KinetoDocument
from headway.interop.readers.kineto.steps import Steps
from headway.interop.readers.torch_json import item_bytes, plain_name
from headway.trace.events import Events, Kind, Stream, texts

_KERNEL = re.compile(
    r"(?<![a-z])(nccl|rccl|msccl|oneccl|xccl|hccl|nvshmem|deep_?ep\b|multimem)|cross_device_reduce|userbuffers"
    r"|(one|two)_?shot_?(all_?reduce|reduce_?scatter)|all_?reduce_?fusion|moe_?all_?to_?all",
    re.IGNORECASE,
)
_RECORD = "record_param_comms"
_ANNOTATION = re.compile(r"^(nccl|rccl|gloo|mpi|ucc|xccl|hccl|symm_mem):_?(\w+)$")
_IN_KERNEL_NAME = (
    (re.compile(r"all_?reduce|cross_device_reduce", re.IGNORECASE), "all_reduce"),
    (re.compile(r"all_?gather", re.IGNORECASE), "all_gather"),
    (re.compile(r"reduce_?scatter", re.IGNORECASE), "reduce_scatter"),
    (re.compile(r"all_?to_?all|(?:::|_)(dispatch|combine)(?![a-z])", re.IGNORECASE), "all_to_all"),
    (re.compile(r"broadcast", re.IGNORECASE), "broadcast"),
    (re.compile(r"send_?recv", re.IGNORECASE), "send_receive"),
    (re.compile(r"(?<![a-z])reduce(?![a-z])|_Reduce_"), "reduce"),
)
_TO_OR_FROM_HOST = re.compile(r"Mem(cpy (HtoD|DtoH|HtoH)|set)", re.IGNORECASE)
_MAX_SEQUENCE = 1 << 40
_CALLED_WITHIN = 8  # largest distance of record-function ids from a call to its Gloo annotation
_REDUCING = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True, eq=False)
class Collectives:
    """Collectives as columns. ``index`` is the event of each, ``caller`` the event that launched it.

    ``start_ns`` to ``end_ns`` spans all of its kernels, ``index`` only the first.
    """

    index: Indices
    caller: Indices
    start_ns: Ints
    end_ns: Ints
    rows: list[Row]

    def where(self, mask: npt.NDArray[np.bool_]) -> Collectives:
        """The rows that ``mask`` selects."""
        rows = [row for row, wanted in zip(self.rows, mask.tolist(), strict=True) if wanted]
        return Collectives(self.index[mask], self.caller[mask], self.start_ns[mask], self.end_ns[mask], rows)

    def notes(self) -> list[str]:
        """Notes for the user."""
        if not self.rows:
            return ["No communication is recorded."]
        notes = []
        unsized = sum(row.size_bytes < 0 for row in self.rows)
        if unsized:
            notes.append(f"{unsized} of {len(self.rows)} collectives have no recorded size.")
        return notes


class EnclosingCalls:
    """The calls and backend annotations that enclose launches of communication."""

    def __init__(self, document: KinetoDocument) -> None:
        annotated = document.of_category("user_annotation", "cpu_op")
        annotated = annotated[document.called(annotated, lambda name: bool(_ANNOTATION.match(name)))]
        self.calls = _Enclosing(document, np.flatnonzero(document.name == _RECORD))
        self.annotations = _Enclosing(document, annotated)

    def around(self, launches: Indices) -> Indices:
        """The innermost call or annotation around each launch, or -1."""
        annotation = self.annotations.around(launches)
        return np.where(annotation >= 0, annotation, self.calls.around(launches))


def is_communication(
    document: KinetoDocument, kernels: Indices, launches: Indices, callers: EnclosingCalls
) -> npt.NDArray[np.bool_]:
    """A mask of the communication kernels, judged by name, or else by what encloses their launches.

    Some libraries' kernels cannot be recognised by name, and copy engines have none. If some kernels of a call are
    recognised by name, its other kernels only prepare tensors.
    """
    named = document.called(kernels, lambda name: bool(_KERNEL.search(name)))
    around = callers.around(launches)
    prepared = np.isin(around, around[named])
    moving = ~document.called(kernels, lambda name: bool(_TO_OR_FROM_HOST.match(name)))
    communicating: npt.NDArray[np.bool_] = named | ((around >= 0) & ~prepared & moving)
    return communicating


def device_collectives(
    document: KinetoDocument,
    kernels: Indices,
    launches: Indices,
    companions: RankCompanions,
    callers: EnclosingCalls,
) -> tuple[Collectives, Indices]:
    """Collectives of the communication ``kernels``; ``launches`` has the launching event of each, or -1.

    Since 2024 kernels describe themselves; before, and for other libraries, the call or annotation around the launch
    does. All kernels of a call are one collective. Also returns the position in ``kernels`` of each one's first.
    """
    call, annotation = callers.calls.around(launches), callers.annotations.around(launches)
    rows: list[Row] = []
    first: list[int] = []
    of_call: dict[int, int] = {}
    end_ns: list[int] = []
    described = zip(
        document.arguments(kernels),
        call.tolist(),
        annotation.tolist(),
        document.name[kernels].tolist(),
        document.end_ns[kernels].tolist(),
        strict=True,
    )
    for position, (kernel_arguments, caller, around, name, until_ns) in enumerate(described):
        row = _described(kernel_arguments)
        arguments = kernel_arguments
        if row is None and (enclosing := max(caller, around)) >= 0:
            if enclosing in of_call:
                place = of_call[enclosing]
                end_ns[place] = max(end_ns[place], until_ns)
                continue
            of_call[enclosing] = len(rows)
            arguments = document.arguments(np.array([caller]))[0] if caller >= 0 else Arguments()
            row = _described(arguments)
            if row is None and around >= 0:
                row = _of_annotation(document.name[around], document.arguments(np.array([around]))[0])
            companion_row = companions.of_call(arguments.record_function)
            row = row.filled_from(companion_row) if row else companion_row
        row = row or Row(_name_in(name))
        companions.take_group(row.group, arguments.ranks, arguments.group_size)
        rows.append(row)
        first.append(position)
        end_ns.append(until_ns)
    begins = np.array(first, dtype=np.intp)
    launched = launches[begins]
    collectives = Collectives(
        kernels[begins],
        np.where(launched >= 0, launched, kernels[begins]),
        document.start_ns[kernels[begins]],
        np.array(end_ns, dtype=np.int64),
        rows,
    )
    return collectives, begins


def host_collectives(document: KinetoDocument, companions: RankCompanions) -> Collectives:
    """Collectives from the annotations of Gloo's worker threads, paired with their calls."""
    annotated = document.of_category("user_annotation", "cpu_op")
    spans = annotated[document.called(annotated, lambda name: name.startswith("gloo:"))]
    calls = document.of_category("cpu_op")
    calls = calls[document.called(calls, lambda name: name.startswith("c10d::"))]
    span_arguments, call_arguments = document.arguments(spans), document.arguments(calls)
    if any(arguments.record_function for arguments in span_arguments):
        pairs = _paired_by_number(span_arguments, call_arguments)
    else:
        pairs = _paired_in_order(document, spans, span_arguments, calls, call_arguments)
    rows, caller_indices = [], []
    for span, arguments, position in zip(spans.tolist(), span_arguments, pairs, strict=True):
        row, caller = _of_annotation(document.name[span], arguments), span
        if position >= 0:
            caller, call = int(calls[position]), call_arguments[position]
            row = _of_call(document.name[caller], call, _item_bytes(arguments)).filled_from(row)
            row = row.filled_from(companions.of_call(call.record_function))
        rows.append(row)
        caller_indices.append(caller)
    callers = np.array(caller_indices, dtype=np.intp)
    companion_rows = companions.in_order(document.start_ns[callers], document.end_ns[callers])
    rows = [row.filled_from(more) for row, more in zip(rows, companion_rows, strict=True)]
    order = np.argsort(
        document.start_ns[callers], kind="stable"
    )  # threads begin in any order, programs ask in one
    spans, callers = spans[order], callers[order]
    rows = [rows[position] for position in order.tolist()]
    return Collectives(spans, callers, document.start_ns[spans], document.end_ns[spans], rows)


def _paired_by_number(span_arguments: Sequence[Arguments], call_arguments: Sequence[Arguments]) -> list[int]:
    """The call of each annotation, or -1: the one with the last record-function id before the annotation's."""
    numbered = sorted(
        (arguments.record_function, position)
        for position, arguments in enumerate(call_arguments)
        if isinstance(arguments.record_function, int)
    )
    ids = [number for number, _ in numbered]
    pairs = []
    for arguments in span_arguments:
        number = arguments.record_function
        at = bisect_left(ids, number) - 1 if isinstance(number, int) and number else -1
        pairs.append(numbered[at][1] if at >= 0 and number - ids[at] <= _CALLED_WITHIN else -1)
    return pairs


def _paired_in_order(
    document: KinetoDocument,
    spans: Indices,
    span_arguments: Sequence[Arguments],
    calls: Indices,
    call_arguments: Sequence[Arguments],
) -> list[int]:
    """The call of each annotation, or -1, without record-function ids (a profiler without an execution trace).

    It is the first unpaired earlier call with a tensor of as many elements and the same name, or else a name that
    Gloo implements with this operation.
    """
    waiting: dict[tuple[str, int], deque[int]] = {}
    events = sorted(
        [(int(document.start_ns[call]), 0, position) for position, call in enumerate(calls.tolist())]
        + [(int(document.start_ns[span]), 1, position) for position, span in enumerate(spans.tolist())]
    )
    pairs = [-1] * len(spans)
    taken: set[int] = set()
    for _, is_span, position in events:
        if not is_span:
            name = plain_name(document.name[calls[position]].removeprefix("c10d::"))
            for numel in _numels(call_arguments[position].dims) or {-1}:
                waiting.setdefault((name, numel), deque()).append(position)
            continue
        match = _ANNOTATION.match(document.name[spans[position]])
        name = plain_name(match[2]) if match else ""
        numels = _numels(span_arguments[position].dims) or {-1}
        for key in ((called, numel) for called in _CARRIED_OUT.get(name, (name,)) for numel in numels):
            queue = waiting.get(key, deque())
            while queue and queue[0] in taken:
                queue.popleft()
            if queue:
                pairs[position] = queue.popleft()
                taken.add(pairs[position])
                break
    return pairs


_CARRIED_OUT = {
    "all_reduce": ("all_reduce", "reduce_scatter", "barrier"),
    "broadcast": ("broadcast", "scatter"),
}
"""The calls that Gloo implements with each operation, where it is more than one."""


def _numels(dims: Any) -> set[int]:
    """The numbers of elements of input tensors, also inside lists; empty if shapes are not recorded."""
    numels: set[int] = set()
    for shape in dims if isinstance(dims, list) else ():
        shapes = shape if isinstance(shape, list) and shape and isinstance(shape[0], list) else [shape]
        for sizes in shapes:
            if isinstance(sizes, list) and sizes and all(isinstance(size, int) for size in sizes):
                numels.add(math.prod(sizes))
    return numels


class Backward(NamedTuple):
    """When a device computed; and for each collective, the start of its step's last backward kernel."""

    busy: intervals.Spans
    last_ns: Ints


def bucket_numbers(
    document: KinetoDocument,
    collectives: Collectives,
    step: Indices,
    phase: Texts,
    backward: Backward | None = None,
) -> Ints:
    """The gradient bucket of each collective, counted within its step; -1 for other collectives.

    Reductions in backward carry gradients, unless layers exchange activations, as in tensor parallelism
    (``_exchanged``). ``backward`` shows what a device waited for.
    """
    reduced = (phase == Kind.BACKWARD) & np.array(
        [row.name in _REDUCING for row in collectives.rows], dtype=bool
    )
    carries = reduced & ~_exchanged(document, collectives, phase, reduced, backward)
    buckets: dict[int, int] = {}
    numbers = []
    for step_index, is_bucket in zip(step.tolist(), carries.tolist(), strict=True):
        numbers.append(buckets.get(step_index, 0) if is_bucket else -1)
        buckets[step_index] = buckets.get(step_index, 0) + is_bucket
    return np.array(numbers, dtype=np.int64)


_ACCUMULATES = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
_OF_LAYERS = re.compile(
    r"(?<![a-z])(tp|tensor|cp|context|sp|sequence|ep|expert|pp|pipeline)(?![a-z])", re.IGNORECASE
)
_OF_REPLICAS = re.compile(r"(?<![a-z])(dp|data|fsdp|ddp|replicate|shard)(?![a-z])", re.IGNORECASE)
_HIDDEN = 0.2  # share of a collective's time; less overlapping computation means that backward waited


def _exchanged(
    document: KinetoDocument,
    collectives: Collectives,
    phase: Texts,
    reduced: npt.NDArray[np.bool_],
    backward: Backward | None,
) -> npt.NDArray[np.bool_]:
    """A mask of the collectives in backward that exchange activations between layers.

    DDP launches its buckets from AccumulateGrad. If no collective was launched there, a kind (group, name and size)
    exchanges activations if its group's name says so, if forward has as many, or if backward waits for it.
    """
    callers = collectives.caller
    accumulating = document.of_category("cpu_op", "Operator")
    accumulating = accumulating[document.called(accumulating, lambda name: name == _ACCUMULATES)]
    by_hook = reduced & (_Enclosing(document, accumulating).around(callers) >= 0)
    described = {
        str(group.name): str(group.description or "") for group in document.head.distributed.pg_config
    }
    names = [described.get(row.group, "") for row in collectives.rows]
    exchanged = np.array(
        [bool(_OF_LAYERS.search(name) and not _OF_REPLICAS.search(name)) for name in names], dtype=bool
    )
    if by_hook.any():
        exchanged |= (
            reduced & ~by_hook & np.array([row.name == "all_reduce" for row in collectives.rows], dtype=bool)
        )
        return exchanged & ~by_hook
    numbers: dict[tuple[str, str, int], int] = {}
    kind = np.array(
        [numbers.setdefault((row.group, row.name, row.size_bytes), len(numbers)) for row in collectives.rows],
        dtype=np.intp,
    )
    of_backward = np.bincount(kind[reduced], minlength=len(numbers))
    of_forward = np.bincount(kind[phase == Kind.FORWARD], minlength=len(numbers))
    as_many = (2 * of_forward >= of_backward) & (of_forward > 0)
    exchanged |= as_many[kind]
    if backward is not None:
        goes_on = backward.last_ns >= collectives.end_ns
        followed = np.flatnonzero(reduced & goes_on)
        hidden = np.bincount(
            kind[followed],
            intervals.length_within(
                backward.busy, collectives.start_ns[followed], collectives.end_ns[followed]
            ),
            len(numbers),
        )
        lasted = np.bincount(
            kind[followed], (collectives.end_ns - collectives.start_ns)[followed], len(numbers)
        )
        waited_for = (lasted > 0) & (hidden < _HIDDEN * lasted)
        exchanged |= waited_for[kind]
    return exchanged & reduced


def collective_events(
    document: KinetoDocument, collectives: Collectives, steps: Steps, step: Indices, bucket: Ints
) -> Events:
    """Events of ``collectives``, given their steps (indices) and buckets."""
    messages = {"send": Kind.SEND, "receive": Kind.RECEIVE}
    on_device = document.of_device(collectives.index)
    start_ns = collectives.start_ns
    # A kernel waits for the other members on the device; a Gloo call waits in a queue for a thread.
    enqueue_ns = np.where(on_device, start_ns, np.minimum(document.start_ns[collectives.caller], start_ns))
    return Events.from_columns(
        kind=texts([messages.get(row.name, Kind.COLLECTIVE) for row in collectives.rows]),
        name=texts([row.name for row in collectives.rows]),
        stream=Stream.COMMUNICATION,
        step=steps.number[step],
        start_ns=start_ns,
        duration_ns=collectives.end_ns - start_ns,
        enqueue_ns=enqueue_ns,
        group=texts([row.group for row in collectives.rows]),
        sequence=np.array([row.sequence for row in collectives.rows], dtype=np.int64),
        size_bytes=np.array([row.size_bytes for row in collectives.rows], dtype=np.int64),
        bucket=bucket,
        peer=np.array([row.peer for row in collectives.rows], dtype=np.int64),
        algorithm=texts([str(name)[:80] for name in document.name[collectives.index].tolist()]),
    )


def _described(arguments: Arguments) -> Row | None:
    if not isinstance(arguments.collective, str):
        return None
    name = plain_name(arguments.collective)
    numels = [
        value
        for value in (arguments.in_numel, arguments.out_numel)
        if isinstance(value, int) and 0 <= value < 2**48
    ]
    size = item_bytes(arguments.dtype)
    size_bytes = max(numels) * size if numels and size > 0 else -1
    peer = arguments.target if name == "send" else arguments.source if name == "receive" else -1
    return Row(
        name[:60],
        _text(arguments.group),
        _small(arguments.sequence, _MAX_SEQUENCE),
        size_bytes,
        _small(peer, 2**31),
    )


def _of_annotation(name: str, arguments: Arguments) -> Row:
    """A row from a backend's annotation, which has the inputs: for gathers, only one member's share."""
    match = _ANNOTATION.match(name)
    plain = plain_name(match[2] if match else name)[:60]
    return Row(plain, size_bytes=-1 if plain in ("all_gather", "gather") else _largest_bytes(arguments))


def _of_call(name: str, arguments: Arguments, element_bytes: int) -> Row:
    """A row from a ``c10d::`` operator, whose largest argument is the whole tensor; ``element_bytes`` is for lists."""
    plain = plain_name(name.removeprefix("c10d::"))[:60]
    peer = -1
    if plain in ("send", "receive") and isinstance(arguments.concrete, list) and len(arguments.concrete) > 2:
        peer = _small(arguments.concrete[2], 2**31)
    return Row(plain, size_bytes=_largest_bytes(arguments, element_bytes or 4), peer=peer)


def _item_bytes(arguments: Arguments) -> int:
    """The element size of the first input with an element type; 0 if there is none."""
    kinds = arguments.types if isinstance(arguments.types, list) else []
    plain = (str(kind).lower().removeprefix("c10::") for kind in kinds)
    return next((size for size in map(item_bytes, plain) if size > 0), 0)


def _largest_bytes(arguments: Arguments, in_lists_bytes: int = 4) -> int:
    """The size of the largest input tensor, or list of tensors; -1 if shapes are not recorded.

    Types of tensors in lists are not recorded: their elements are taken to have ``in_lists_bytes``.
    """
    if not isinstance(arguments.dims, list) or not isinstance(arguments.types, list):
        return -1
    item_bytes = _item_bytes(arguments) or (in_lists_bytes if "TensorList" in arguments.types else 0)
    try:
        numel = max((_numel(dims) for dims in arguments.dims), default=0)
    except (TypeError, LookupError, ArithmeticError, RecursionError):
        return -1
    return int(numel) * item_bytes if item_bytes and 0 < numel < 2**48 else -1


def _numel(dims: Any) -> int:
    """The number of elements of a shape, or of a list of shapes."""
    if not dims:
        return 0
    if isinstance(dims[0], list):
        return sum(_numel(dim) for dim in dims)
    return math.prod(dims)


def _small(value: Any, limit: int) -> int:
    """``value`` as a number if it is from 0 to below ``limit``, else -1."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    return value if isinstance(value, int) and 0 <= value < limit else -1


def _text(value: Any) -> str:
    return str(value)[:200] if value is not None else ""


def _name_in(kernel: str) -> str:
    return next((name for part, name in _IN_KERNEL_NAME if part.search(kernel)), "collective")


class _Enclosing:
    """Looks up the span that encloses an event on its thread."""

    def __init__(self, document: KinetoDocument, indices: Indices) -> None:
        self._document = document
        threads = document.threads(indices)
        self._of_thread = {thread: indices[threads == thread] for thread in np.unique(threads).tolist()}

    def around(self, events: Indices) -> Indices:
        """The span around the start of each event, or -1; event -1 gives -1."""
        document = self._document
        enclosing = np.full(len(events), -1, dtype=np.intp)
        some = np.flatnonzero(events >= 0)
        threads = document.threads(events[some])
        for thread, spans in self._of_thread.items():
            rows = some[threads == thread]
            moments = document.start_ns[events[rows]]
            position = np.searchsorted(document.start_ns[spans], moments, side="right") - 1
            span = spans[np.maximum(position, 0)]
            inside = (position >= 0) & (moments < document.end_ns[span])
            enclosing[rows[inside]] = span[inside]
        return enclosing
