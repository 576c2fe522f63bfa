"""The bound that dependencies leave: no schedule of a model's gradients can make the recorded step shorter.

Communication is cut as finely as one likes, costs nothing but its bytes, and keeps the slowest link busy whenever
there is something to send. A parameter's gradient is reduced when it is ready; it is gathered when it has been
reduced (gradients) or when the optimizer steps (parameters); a module's forward waits for its own gathers. For one link
and work that may be interrupted, serving what is due first gives the least lateness (Horn, 1974), which is what forward
has to wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, fields

from headway.planning.surrogate import Predictor
from headway.scheduling.buckets import GatherMode

NS_A_MS = 1e6


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds of a step, in nanoseconds.

    ``overlap_ns`` is the published one, rest + max(forward, c) + max(backward, c) with one way ``c``. It holds
    where gathers begin after backward and nothing is in flight during the rest of the step; others can beat it.
    ``gradients_ns`` and ``parameters_ns`` hold for every schedule of that form.
    """

    overlap_ns: float
    gradients_ns: float
    parameters_ns: float

    def of(self, gather: GatherMode) -> float:
        """The bound of one form."""
        return self.gradients_ns if gather == "gradients" else self.parameters_ns

    @classmethod
    def least(cls, bounds: Iterable[Bounds]) -> Bounds:
        """What nothing can beat that has to keep to one of ``bounds``, which are not none."""
        each = list(bounds)
        return cls(*(min(getattr(one, field.name) for one in each) for field in fields(cls)))


def bounds_of(predictor: Predictor) -> Bounds:
    """The bounds of a model's step on a cluster."""
    profile = predictor.profile
    one_way_ns = predictor.cost.reduce_scatter.ns_per_byte * predictor.total_bytes
    rest_ns = profile.between_ns + profile.tail_ns + profile.rest_ns
    return Bounds(
        overlap_ns=rest_ns + max(profile.forward_ns, one_way_ns) + max(profile.backward_ns, one_way_ns),
        gradients_ns=_bound_ns(predictor, "gradients"),
        parameters_ns=_bound_ns(predictor, "parameters"),
    )


def _bound_ns(predictor: Predictor, gather: GatherMode) -> float:
    profile, cost = predictor.profile, predictor.cost
    forward_ns = predictor.step_at_ns + profile.rest_ns
    end_ns = forward_ns + profile.forward_ns + profile.between_ns + predictor.first_ns
    updated_ns = 0.0
    work: list[tuple[float, float, float]] = []  # released, due, for how long the link is used
    for name in sorted(predictor.need, key=predictor.need.__getitem__):
        size_bytes = predictor.model.by_name[name].size_bytes
        need_ns = predictor.need_ns[predictor.need[name]]
        due_ns = end_ns if need_ns < 0 else forward_ns + need_ns
        reduce_ns, gather_ns = (
            half.ns_per_byte * size_bytes for half in (cost.reduce_scatter, cost.all_gather)
        )
        if gather == "gradients":
            work.append((predictor.ready_ns[name], due_ns + updated_ns, reduce_ns + gather_ns))
            updated_ns += predictor.update_ns(size_bytes)
        else:
            work.append((predictor.ready_ns[name], due_ns, reduce_ns))
            work.append((predictor.step_at_ns, due_ns, gather_ns))
    return end_ns + updated_ns + max(0.0, least_lateness(work))


def least_lateness(work: Iterable[tuple[float, float, float]]) -> float:
    """The least that the latest of ``work`` (released, due, length) can be late on one link; may be negative."""
    coming = sorted(work)
    latest = float("-inf")
    now = 0.0
    open_work: list[tuple[float, float]] = []  # due, what is left
    index = 0
    while index < len(coming) or open_work:
        if not open_work:
            now = max(now, coming[index][0])
        while index < len(coming) and coming[index][0] <= now:
            _, due, length = coming[index]
            heapq.heappush(open_work, (due, length))
            index += 1
        due, left = heapq.heappop(open_work)
        until = coming[index][0] if index < len(coming) else float("inf")
        if now + left > until:
            heapq.heappush(open_work, (due, left - (until - now)))
            now = until
        else:
            now += left
            latest = max(latest, now - due)
    return latest
