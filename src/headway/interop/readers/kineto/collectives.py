"""Collectives of a Kineto document: kernels of NCCL and RCCL, and what Gloo says of its own."""

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
from headway.interop.readers.kineto.companions import Known, Row
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
_CALLED_WITHIN = 8  # Gloo's annotation has a record-function id at most this much after its call's
_REDUCING = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True, eq=False)
class Collectives:
    """Columns, one row a collective. ``index`` is the event that spans it, ``asked`` the one that asked for it.

    It lasts from ``start_ns`` to ``end_ns``, which is longer than ``index`` where it takes several kernels.
    """

    index: Indices
    asked: Indices
    start_ns: Ints
    end_ns: Ints
    rows: list[Row]

    def where(self, mask: npt.NDArray[np.bool_]) -> Collectives:
        """Those that ``mask`` picks."""
        rows = [row for row, wanted in zip(self.rows, mask.tolist(), strict=True) if wanted]
        return Collectives(self.index[mask], self.asked[mask], self.start_ns[mask], self.end_ns[mask], rows)

    def notes(self) -> list[str]:
        """What has to be said of them."""
        if not self.rows:
            return ["No communication is recorded."]
        notes = []
        unsized = sum(row.size_bytes < 0 for row in self.rows)
        if unsized:
            notes.append(f"{unsized} of {len(self.rows)} collectives do not say how much they carry.")
        return notes


class Asked:
    """What asked for communication: the calls that describe it, and what backends annotate around their launches."""

    def __init__(self, document: KinetoDocument) -> None:
        annotated = document.of_category("user_annotation", "cpu_op")
        annotated = annotated[document.called(annotated, lambda name: bool(_ANNOTATION.match(name)))]
        self.calls = _Enclosing(document, np.flatnonzero(document.name == _RECORD))
        self.annotations = _Enclosing(document, annotated)

    def around(self, launches: Indices) -> Indices:
        """The innermost of them around each launch, or -1."""
        annotation = self.annotations.around(launches)
        return np.where(annotation >= 0, annotation, self.calls.around(launches))


def is_communication(
    document: KinetoDocument, kernels: Indices, launches: Indices, asked: Asked
) -> npt.NDArray[np.bool_]:
    """Which kernels are communication: by their names, or else by what encloses their launches.

    Not every library has its name in its kernels', and copy engines have none. Where some kernels of a call are known
    by name the others prepare its tensors.
    """
    named = document.called(kernels, lambda name: bool(_KERNEL.search(name)))
    around = asked.around(launches)
    prepared = np.isin(around, around[named])
    moving = ~document.called(kernels, lambda name: bool(_TO_OR_FROM_HOST.match(name)))
    communicating: npt.NDArray[np.bool_] = named | ((around >= 0) & ~prepared & moving)
    return communicating


def device_collectives(
    document: KinetoDocument, kernels: Indices, launches: Indices, known: Known, asked: Asked
) -> tuple[Collectives, Indices]:
    """The communication ``kernels``; ``launches`` has the event that launched each of them, or -1.

    A kernel describes itself since 2024; before, and of other libraries, the call around its launch does, in two
    different ways. Several kernels of one call are one collective. Returns also which of ``kernels`` each begins with.
    """
    call, annotation = asked.calls.around(launches), asked.annotations.around(launches)
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
    for position, (own, caller, around, name, until_ns) in enumerate(described):
        row = _described(own)
        said = own
        if row is None and (enclosing := max(caller, around)) >= 0:
            if enclosing in of_call:
                place = of_call[enclosing]
                end_ns[place] = max(end_ns[place], until_ns)
                continue
            of_call[enclosing] = len(rows)
            said = document.arguments(np.array([caller]))[0] if caller >= 0 else Arguments()
            row = _described(said)
            if row is None and around >= 0:
                row = _of_annotation(document.name[around], document.arguments(np.array([around]))[0])
            told = known.of_call(said.record_function)
            row = row.filled_from(told) if row else told
        row = row or Row(_name_in(name))
        known.take_group(row.group, said.ranks, said.group_size)
        rows.append(row)
        first.append(position)
        end_ns.append(until_ns)
    begins = np.array(first, dtype=np.intp)
    launched = launches[begins]
    found = Collectives(
        kernels[begins],
        np.where(launched >= 0, launched, kernels[begins]),
        document.start_ns[kernels[begins]],
        np.array(end_ns, dtype=np.int64),
        rows,
    )
    return found, begins


def host_collectives(document: KinetoDocument, known: Known) -> Collectives:
    """What Gloo's worker threads annotate, with the calls that asked for it."""
    annotated = document.of_category("user_annotation", "cpu_op")
    spans = annotated[document.called(annotated, lambda name: name.startswith("gloo:"))]
    calls = document.of_category("cpu_op")
    calls = calls[document.called(calls, lambda name: name.startswith("c10d::"))]
    said, asked_for = document.arguments(spans), document.arguments(calls)
    if any(own.record_function for own in said):
        pairs = _paired_by_number(said, asked_for)
    else:
        pairs = _paired_in_order(document, spans, said, calls, asked_for)
    rows, asked = [], []
    for span, own, position in zip(spans.tolist(), said, pairs, strict=True):
        row, caller = _of_annotation(document.name[span], own), span
        if position >= 0:
            caller, call = int(calls[position]), asked_for[position]
            row = _of_call(document.name[caller], call, _item_bytes(own)).filled_from(row)
            row = row.filled_from(known.of_call(call.record_function))
        rows.append(row)
        asked.append(caller)
    callers = np.array(asked, dtype=np.intp)
    told = known.in_order(document.start_ns[callers], document.end_ns[callers])
    rows = [row.filled_from(more) for row, more in zip(rows, told, strict=True)]
    order = np.argsort(
        document.start_ns[callers], kind="stable"
    )  # threads begin in any order, programs ask in one
    spans, callers = spans[order], callers[order]
    rows = [rows[position] for position in order.tolist()]
    return Collectives(spans, callers, document.start_ns[spans], document.end_ns[spans], rows)


def _paired_by_number(said: Sequence[Arguments], asked_for: Sequence[Arguments]) -> list[int]:
    """The call of each annotation, or -1: the one whose record-function id comes last before its own."""
    numbered = sorted(
        (own.record_function, position)
        for position, own in enumerate(asked_for)
        if isinstance(own.record_function, int)
    )
    ids = [number for number, _ in numbered]
    pairs = []
    for own in said:
        number = own.record_function
        at = bisect_left(ids, number) - 1 if isinstance(number, int) and number else -1
        pairs.append(numbered[at][1] if at >= 0 and number - ids[at] <= _CALLED_WITHIN else -1)
    return pairs


def _paired_in_order(
    document: KinetoDocument,
    spans: Indices,
    said: Sequence[Arguments],
    calls: Indices,
    asked_for: Sequence[Arguments],
) -> list[int]:
    """The call of each annotation, or -1, where nothing numbers them (a profiler without an execution trace).

    Of the calls before it that have a tensor of as many elements and no annotation yet, it is the first one of the
    same name, or else of a name that Gloo carries out with this one.
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
            for numel in _numels(asked_for[position].dims) or {-1}:
                waiting.setdefault((name, numel), deque()).append(position)
            continue
        found = _ANNOTATION.match(document.name[spans[position]])
        name = plain_name(found[2]) if found else ""
        numels = _numels(said[position].dims) or {-1}
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
"""The calls that Gloo carries out as each of its operations, where it has several."""


def _numels(dims: Any) -> set[int]:
    """The numbers of elements of the tensors among some inputs, and of those in lists; empty where none is told."""
    found: set[int] = set()
    for shape in dims if isinstance(dims, list) else ():
        shapes = shape if isinstance(shape, list) and shape and isinstance(shape[0], list) else [shape]
        for each in shapes:
            if isinstance(each, list) and each and all(isinstance(size, int) for size in each):
                found.add(math.prod(each))
    return found


class Backward(NamedTuple):
    """When a device computed; and for each collective when the last kernel of its step's backward began."""

    busy: intervals.Spans
    last_ns: Ints


def bucket_numbers(
    document: KinetoDocument,
    found: Collectives,
    step: Indices,
    phase: Texts,
    backward: Backward | None = None,
) -> Ints:
    """Which bucket of gradients each collective carries, counted in each step; -1 where it carries none.

    What a backward reduces are gradients, unless layers exchange activations there, as tensor parallelism does
    (``_exchanged``). ``backward`` tells what was waited for, where a device computes.
    """
    reduced = (phase == Kind.BACKWARD) & np.array([row.name in _REDUCING for row in found.rows], dtype=bool)
    carries = reduced & ~_exchanged(document, found, phase, reduced, backward)
    buckets: dict[int, int] = {}
    numbers = []
    for one, is_bucket in zip(step.tolist(), carries.tolist(), strict=True):
        numbers.append(buckets.get(one, 0) if is_bucket else -1)
        buckets[one] = buckets.get(one, 0) + is_bucket
    return np.array(numbers, dtype=np.int64)


_ACCUMULATES = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
_OF_LAYERS = re.compile(
    r"(?<![a-z])(tp|tensor|cp|context|sp|sequence|ep|expert|pp|pipeline)(?![a-z])", re.IGNORECASE
)
_OF_REPLICAS = re.compile(r"(?<![a-z])(dp|data|fsdp|ddp|replicate|shard)(?![a-z])", re.IGNORECASE)
_HIDDEN = 0.2  # of a collective's time: computation under less of it waited for it


def _exchanged(
    document: KinetoDocument,
    found: Collectives,
    phase: Texts,
    reduced: npt.NDArray[np.bool_],
    backward: Backward | None,
) -> npt.NDArray[np.bool_]:
    """Which collectives of backward exchange activations between layers.

    DDP asks for its buckets where gradients are accumulated. Where no collective was asked for there, those exchange
    activations whose group says so, those like which forward has as many, and those that backward waits for before it
    goes on: as kinds, by group, name and size.
    """
    asked = found.asked
    accumulating = document.of_category("cpu_op", "Operator")
    accumulating = accumulating[document.called(accumulating, lambda name: name == _ACCUMULATES)]
    by_hook = reduced & (_Enclosing(document, accumulating).around(asked) >= 0)
    described = {
        str(group.name): str(group.description or "") for group in document.head.distributed.pg_config
    }
    names = [described.get(row.group, "") for row in found.rows]
    exchanged = np.array(
        [bool(_OF_LAYERS.search(name) and not _OF_REPLICAS.search(name)) for name in names], dtype=bool
    )
    if by_hook.any():
        exchanged |= (
            reduced & ~by_hook & np.array([row.name == "all_reduce" for row in found.rows], dtype=bool)
        )
        return exchanged & ~by_hook
    numbers: dict[tuple[str, str, int], int] = {}
    kind = np.array(
        [numbers.setdefault((row.group, row.name, row.size_bytes), len(numbers)) for row in found.rows],
        dtype=np.intp,
    )
    of_backward = np.bincount(kind[reduced], minlength=len(numbers))
    of_forward = np.bincount(kind[phase == Kind.FORWARD], minlength=len(numbers))
    as_many = (2 * of_forward >= of_backward) & (of_forward > 0)
    exchanged |= as_many[kind]
    if backward is not None:
        goes_on = backward.last_ns >= found.end_ns
        followed = np.flatnonzero(reduced & goes_on)
        hidden = np.bincount(
            kind[followed],
            intervals.length_within(backward.busy, found.start_ns[followed], found.end_ns[followed]),
            len(numbers),
        )
        lasted = np.bincount(kind[followed], (found.end_ns - found.start_ns)[followed], len(numbers))
        waited_for = (lasted > 0) & (hidden < _HIDDEN * lasted)
        exchanged |= waited_for[kind]
    return exchanged & reduced


def collective_events(
    document: KinetoDocument, found: Collectives, steps: Steps, step: Indices, bucket: Ints
) -> Events:
    """Events of collectives that lie in ``step`` (indices) and carry ``bucket``."""
    messages = {"send": Kind.SEND, "receive": Kind.RECEIVE}
    on_device = document.of_device(found.index)
    start_ns = found.start_ns
    # A kernel waits for its members on the device; Gloo's call waits in a queue for a thread.
    enqueue_ns = np.where(on_device, start_ns, np.minimum(document.start_ns[found.asked], start_ns))
    return Events.from_columns(
        kind=texts([messages.get(row.name, Kind.COLLECTIVE) for row in found.rows]),
        name=texts([row.name for row in found.rows]),
        stream=Stream.COMMUNICATION,
        step=steps.number[step],
        start_ns=start_ns,
        duration_ns=found.end_ns - start_ns,
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
        return sum(_numel(dim) for dim in dims)
    return math.prod(dims)


def _small(value: Any, limit: int) -> int:
    """``value`` where it is a number from 0 to ``limit``; -1 otherwise."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    return value if isinstance(value, int) and 0 <= value < limit else -1


def _text(value: Any) -> str:
    return str(value)[:200] if value is not None else ""


def _name_in(kernel: str) -> str:
    return next((name for part, name in _IN_KERNEL_NAME if part.search(kernel)), "collective")


class _Enclosing:
    """Which of some spans a moment of a thread lies in."""

    def __init__(self, document: KinetoDocument, indices: Indices) -> None:
        self._document = document
        threads = document.threads(indices)
        self._of_thread = {thread: indices[threads == thread] for thread in np.unique(threads).tolist()}

    def around(self, events: Indices) -> Indices:
        """The span around the start of each event, or -1; of an event that is -1, too."""
        document = self._document
        found = np.full(len(events), -1, dtype=np.intp)
        some = np.flatnonzero(events >= 0)
        threads = document.threads(events[some])
        for thread, spans in self._of_thread.items():
            own = some[threads == thread]
            moments = document.start_ns[events[own]]
            position = np.searchsorted(document.start_ns[spans], moments, side="right") - 1
            span = spans[np.maximum(position, 0)]
            inside = (position >= 0) & (moments < document.end_ns[span])
            found[own[inside]] = span[inside]
        return found
