"""Buckets: which gradients share one collective, and in which order collectives are issued."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headway.model import ModelSpec, ParameterSpec


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters whose gradients share one collective. All have one dtype."""

    index: int
    parameters: tuple[str, ...]
    dtype: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class BucketSchedule:
    """A whole decision: buckets in the order of their reduction, and the order of their gathers.

    ``gather_order`` holds bucket indices in the order in which the next forward needs them; it is empty for
    strategies whose collective leaves every rank with the whole result.
    """

    buckets: tuple[Bucket, ...]
    gather_order: tuple[int, ...] = ()

    @property
    def bucket_of(self) -> dict[str, int]:
        """The index of each parameter's bucket."""
        return {name: bucket.index for bucket in self.buckets for name in bucket.parameters}


def make_buckets(groups: Iterable[Sequence[ParameterSpec]]) -> tuple[Bucket, ...]:
    """Number ``groups`` of parameters in order; each group must be of one dtype and not empty."""
    return tuple(
        Bucket(
            index=index,
            parameters=tuple(p.name for p in group),
            dtype=group[0].dtype,
            size_bytes=sum(p.size_bytes for p in group),
        )
        for index, group in enumerate(groups)
    )


def group_by_size(parameters: Sequence[ParameterSpec], cap_bytes: int) -> list[list[ParameterSpec]]:
    """Cut ``parameters``, in their order, into runs of one dtype and of about ``cap_bytes``.

    A run closes before the parameter that would take it past the cap, so that only a single parameter
    larger than the cap makes a larger bucket.
    """
    groups: list[list[ParameterSpec]] = []
    size_bytes = 0
    for parameter in parameters:
        fits = (
            groups
            and groups[-1][0].dtype == parameter.dtype
            and size_bytes + parameter.size_bytes <= cap_bytes
        )
        if fits:
            groups[-1].append(parameter)
            size_bytes += parameter.size_bytes
        else:
            groups.append([parameter])
            size_bytes = parameter.size_bytes
    return groups


def forward_gather_order(model: ModelSpec, buckets: Sequence[Bucket]) -> tuple[int, ...]:
    """Bucket indices by the first of their parameters that forward needs."""
    position = {parameter.name: index for index, parameter in enumerate(model.forward_parameters())}
    first_use = {bucket.index: min(position[name] for name in bucket.parameters) for bucket in buckets}
    return tuple(sorted(first_use, key=lambda index: (first_use[index], index)))
