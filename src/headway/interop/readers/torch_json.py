"""Shared parsing of PyTorch's JSON recordings: operation names, element sizes, group ranks, damaged lists."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from headway.arrays import Ints
from headway.trace.format import MAX_WORLD_SIZE

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, MemoryError)
"""Decoders raise these for invalid JSON, another schema, and endless nesting or numbers."""

COLLECTIVES = frozenset(
    [
        "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "reduce", "barrier", "gather",
        "scatter",
    ]
)  # fmt: skip
MESSAGES = frozenset({"send", "receive"})

_SAME = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all", "all_to_allv": "all_to_all", "alltoallv": "all_to_all", "all_to_all_v": "all_to_all",
    "all_gather_v": "all_gather", "reduce_scatter_v": "reduce_scatter", "monitored_barrier": "barrier",
    "all_reduce_barrier": "barrier", "recv": "receive", "recv_any_source": "receive", "recvanysource": "receive",
    "send_recv": "send_receive",
}  # fmt: skip
_FORMS = re.compile(r"_(base|coalesced|single|oop|sparse|into_tensor|tensor|out)$")

_ITEM_BYTES = {
    "byte": 1, "char": 1, "short": 2, "int": 4, "long": 8, "half": 2, "float": 4, "double": 8, "bool": 1,
    "bfloat16": 2, "complexhalf": 4, "complexfloat": 8, "complexdouble": 16, "uint16": 2, "uint32": 4, "uint64": 8,
    "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2, "float32": 4, "float64": 8,
    "unsigned char": 1, "signed char": 1, "long int": 8, "c10::half": 2, "c10::bfloat16": 2,
    "float8_e5m2": 1, "float8_e4m3fn": 1, "float8_e5m2fnuz": 1, "float8_e4m3fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
_MOST_FAILURES = 1000  # unreadable stretches before salvaging gives up
_MOST_WASTED = 4  # limit on failed reading, in document lengths

_Item = TypeVar("_Item")


def plain_name(name: str) -> str:
    """An operation's name as ``torch.distributed`` calls it: "all_reduce" for ``allreduce_`` or ``_allreduce_base``."""
    plain = name.strip("_").lower()
    while shorter := _FORMS.sub("", plain):
        if shorter == plain:
            break
        plain = shorter
    return _SAME.get(plain, plain)


def item_bytes(dtype: object) -> int:
    """The size of one element of ``dtype``, under any of PyTorch's names; -1 if unknown."""
    return _ITEM_BYTES.get(dtype.lower(), -1) if isinstance(dtype, str) else -1


def bounded_int(value: object, high: int = 2**62) -> int:
    """``value`` if it is an integer from 0 to ``high``, else -1."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= high else -1


def ints(values: Sequence[int]) -> Ints:
    """A column of integers."""
    return np.array(values, dtype=np.int64)


def ranks_of(stated: object, size: object = None) -> tuple[int, ...]:
    """A group's ranks from a list or its text; an empty list means all ``size`` ranks. () if unreadable.

    The profiler abbreviates long lists, as in "[0, 8, ..., 248]"; evenly spaced ranks are filled in.
    """
    if isinstance(stated, str):
        if ", ...," in stated:
            return _without_gap(stated, bounded_int(size, MAX_WORLD_SIZE))
        try:
            stated = msgspec.json.decode(stated)
        except UNREADABLE:
            return ()
    if not isinstance(stated, list) or len(stated) > MAX_WORLD_SIZE:
        return ()
    if not stated:
        return tuple(range(max(bounded_int(size, MAX_WORLD_SIZE), 0)))
    ranks = tuple(bounded_int(rank, MAX_WORLD_SIZE - 1) for rank in stated)
    return () if -1 in ranks else ranks


def _without_gap(stated: str, size: int) -> tuple[int, ...]:
    numbers = [int(number) for number in re.findall(r"\d{1,9}", stated)]
    *first, last = numbers or [0]
    stride = first[1] - first[0] if len(first) > 1 else 0
    if stride <= 0 or any(after - before != stride for before, after in itertools.pairwise(first)):
        return ()
    ranks = range(first[0], last + 1, stride)
    return tuple(ranks) if len(ranks) == size and ranks[-1] == last else ()


def member(ranks: Sequence[int], index: int) -> int:
    """The rank of a group's member, or ``index`` itself if the group's ranks are unknown."""
    return ranks[index] if 0 <= index < len(ranks) else index


def salvaged(
    data: bytes, key: bytes, start: re.Pattern[str], read: Callable[[Any], _Item | None]
) -> tuple[list[_Item], int]:
    """Salvage items of the list ``key`` from a damaged document; also counts the unreadable stretches.

    ``start`` finds where an item may begin; ``read`` converts an item, or returns None.
    """
    begin = data.find(key)
    text = data[begin:].decode(errors="replace") if begin >= 0 else ""
    decoder = json.JSONDecoder()
    items: list[_Item] = []
    broken = wasted = 0
    match = start.search(text)
    while match and broken < _MOST_FAILURES and wasted <= _MOST_WASTED * len(text):
        begin, end = match.start(), len(text)
        item = None
        try:
            value, end = decoder.raw_decode(text, begin)
            item = read(value)
        except UNREADABLE as failure:
            end = getattr(failure, "pos", end)
        if item is None:
            broken += 1
            wasted += end - begin
            end = begin + 1
        else:
            items.append(item)
        match = start.search(text, end)
    return items, broken
