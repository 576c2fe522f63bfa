"""Tensor fusion: published policies that group gradients into collectives, as pure functions.

All follow the order in which gradients become ready. Groups contain every element once, never mix dtypes, and are listed
in the order in which they can be reduced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headway.errors import PlanError
from headway.model import DTYPE_BYTES, ModelSpec, ParameterSpec
from headway.scheduling.buckets import Part, group_by_size, whole_parameter

Groups = list[list[Part]]
CapAt = Callable[[int], float]
"""bytes before a group -> its size limit in bytes."""


def cut(parameters: Iterable[ParameterSpec], limit_bytes: float) -> list[Part]:
    """Split parameters larger than ``limit_bytes`` into equal parts (up to one element), in order.

    A split tensor can start early and be overtaken (ByteScheduler, Peng et al., SOSP 2019).
    """
    parts = []
    for parameter in parameters:
        limit = max(1, int(limit_bytes // DTYPE_BYTES[parameter.dtype]))
        count = max(1, -(-parameter.numel // limit))
        bounds = [index * parameter.numel // count for index in range(count + 1)]
        parts += [Part(parameter.name, start, end) for start, end in itertools.pairwise(bounds)]
    return parts


def size_bytes(part: Part, model: ModelSpec) -> int:
    """The size of a part."""
    return part.numel * DTYPE_BYTES[model.by_name[part.parameter].dtype]


def fill(parts: Sequence[Part], model: ModelSpec, cap: float | CapAt) -> Groups:
    """Group consecutive ``parts`` into groups of at most ``cap`` bytes, which may depend on where a group begins.

    A group holds parts of at most one split parameter: buckets that share a parameter complete together, and must not
    delay others. Dtypes are grouped separately. Groups are sorted by their last parts.
    """
    cap_at: CapAt = cap if callable(cap) else lambda _: cap
    open_groups: dict[str, _Open] = {}
    groups: Groups = []
    begun = 0
    for part in parts:
        parameter = model.by_name[part.parameter]
        size = part.numel * DTYPE_BYTES[parameter.dtype]
        cut_name = part.parameter if part.numel < parameter.numel else ""
        current = open_groups.get(parameter.dtype)
        if current is None or not current.takes(size, cut_name):
            current = open_groups[parameter.dtype] = _Open(cap_at(begun))
            groups.append(current.parts)
        current.parts.append(part)
        current.filled += size
        current.cut_name = cut_name or current.cut_name
        begun += size
    return [coalesced(group) for group in by_last_part(groups, parts)]


def coalesced(parts: Iterable[Part]) -> list[Part]:
    """Merge adjacent parts of one parameter."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if last is not None and last.parameter == part.parameter and last.end == part.start:
            merged[-1] = Part(part.parameter, last.start, part.end)
        else:
            merged.append(part)
    return merged


@dataclass(slots=True)
class _Open:
    """A group that is being filled."""

    cap: float
    parts: list[Part] = field(default_factory=list)
    filled: int = 0
    cut_name: str = ""  # the parameter of which it holds a part only

    def takes(self, size: int, cut_name: str) -> bool:
        return self.filled + size <= self.cap and (not cut_name or self.cut_name in ("", cut_name))


def by_last_part(groups: Groups, parts: Sequence[Part]) -> Groups:
    """Sort groups by their last element in ``parts``."""
    if len(groups) < 2:
        return groups
    position = {part: index for index, part in enumerate(parts)}
    return sorted(groups, key=lambda group: position[group[-1]])


MIB = 2**20


def fixed(model: ModelSpec, cap_bytes: int) -> Groups:
    """Runs of at most ``cap_bytes``, except for single larger parameters."""
    return [[whole_parameter(p) for p in run] for run in group_by_size(model.ready_parameters(), cap_bytes)]


def mg_wfbp(model: ModelSpec, ready_ns: Mapping[str, int], alpha_ns: float, ns_per_byte: float) -> Groups:
    """Merged-gradient WFBP (Shi, Chu and Li, INFOCOM 2019).

    A collective of ``n`` bytes takes ``alpha_ns + ns_per_byte * n`` and begins when its last gradient is ready and the
    previous collective is done. A gradient is merged with the next one if that is ready within ``alpha_ns`` of this
    collective's begin. Parameters missing from ``ready_ns`` count as the latest.
    """
    latest = max(ready_ns.values(), default=0)
    groups: Groups = []
    dtype = ""
    free_ns = begin_ns = 0.0
    filled = 0
    for parameter in model.ready_parameters():
        ready = ready_ns.get(parameter.name, latest)
        if groups and parameter.dtype == dtype and ready < begin_ns + alpha_ns:
            groups[-1].append(whole_parameter(parameter))
            filled += parameter.size_bytes
        else:
            if groups:
                free_ns = begin_ns + alpha_ns + ns_per_byte * filled
            groups.append([whole_parameter(parameter)])
            dtype, filled = parameter.dtype, parameter.size_bytes
        begin_ns = max(free_ns, begin_ns if len(groups[-1]) > 1 else 0.0, ready)
    return groups


def earliest(model: ModelSpec, ready_ns: Mapping[str, int], time_ns: Callable[[int], float]) -> Groups:
    """Find the groups with the earliest end of the last collective, if collectives run one after the other.

    A collective of ``n`` bytes takes ``time_ns(n)``, increasing in ``n``, and begins when its last gradient is ready and
    the previous one is done. Exact, by dynamic programming. Parameters missing from ``ready_ns`` count as the latest.
    """
    parameters = model.ready_parameters()
    latest = max(ready_ns.values(), default=0)
    done_ns, begins = [0.0], [0]
    ready = 0
    for end, last in enumerate(parameters, start=1):
        ready = max(ready, ready_ns.get(last.name, latest))
        best_ns, best, filled = math.inf, end - 1, 0
        for begin in range(end - 1, -1, -1):
            if parameters[begin].dtype != last.dtype:
                break
            filled += parameters[begin].size_bytes
            taken_ns = time_ns(filled)
            if ready + taken_ns >= best_ns:
                break
            if (own_ns := max(done_ns[begin], ready) + taken_ns) < best_ns:
                best_ns, best = own_ns, begin
        done_ns.append(best_ns)
        begins.append(best)
    groups: Groups = []
    end = len(parameters)
    while end:
        groups.insert(0, [whole_parameter(parameter) for parameter in parameters[begins[end] : end]])
        end = begins[end]
    return groups


def bucket_caps_mb(groups: Groups, model: ModelSpec) -> tuple[float, ...]:
    """The ``bucket_caps_mb`` of a DistributedDataParallelStrategy that makes exactly these groups of whole parameters.

    DDP closes a bucket once it reaches its cap, so each cap is a group's exact size. Raises PlanError for what stock DDP
    cannot do: parts of parameters, several dtypes, groups out of ready order.
    """
    order = [part for group in groups for part in group]
    if order != [whole_parameter(parameter) for parameter in model.ready_parameters()]:
        raise PlanError(
            "stock DDP cannot make these buckets",
            expected="whole parameters in the order in which gradients become ready",
            fix="Use the decoupled strategy, or another fusion.",
        )
    if len({parameter.dtype for parameter in model.parameters}) > 1:
        raise PlanError(
            "stock DDP cannot make these buckets: it applies caps per dtype",
            expected="parameters of one dtype",
            fix="Use bucket_cap_mb, or the decoupled strategy.",
        )
    return tuple(sum(size_bytes(part, model) for part in group) / MIB for group in groups)
