"""Policy of the decoupled all-reduce (DeAR, arXiv 2302.12445): buckets, their gathers, and what is gathered."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from headway.collectives.selection import AlgorithmName, Algorithms, SizeClass
from headway.compression.cast import Cast
from headway.compression.codec import FLOATS
from headway.errors import PlanError
from headway.job import Job
from headway.model import ModelSpec, ParameterSpec
from headway.permission import PRECISION
from headway.scheduling.buckets import (
    BucketSchedule,
    GatherMode,
    Part,
    forward_gather_order,
    group_by_size,
    make_buckets,
    whole_parameter,
)
from headway.scheduling.schedule import Schedule
from headway.strategies.base import Strategy
from headway.units import counted

DEFAULT_CAP_BYTES = 4 * 2**20
DEVICE_CAP_BYTES = 25 * 2**20
"""Of a module wrapped by hand on a device, whose host takes longer to launch a bucket's work than that takes."""

_PART = re.compile(r"(?P<name>.+?)(?:\[(?P<start>\d+):(?P<end>\d+)\])?")


class DecoupledStrategy(Strategy):
    """Reduce-scatter under backward, all-gather under the next forward."""

    name: ClassVar[str] = "decoupled"

    bucket_cap_bytes: int = Field(default=DEFAULT_CAP_BYTES, gt=0)
    """If ``buckets`` is empty: the size at most of buckets, which are filled in the order in which gradients become
    ready."""

    gather: GatherMode = "parameters"
    """What is gathered: parameters, after each rank has updated its share of them, or gradients, after which every rank
    updates everything."""

    channels: int = Field(default=2, ge=1, le=8)
    """How many collectives are in flight at a time."""

    buckets: tuple[tuple[str, ...], ...] = ()
    """The parameters of each bucket, or parts of them as ``name[start:end]`` (elements), in the order of reduction."""

    gather_order: tuple[int, ...] = ()
    """Indices of buckets in the order in which they are gathered; if empty, the order in which forward needs them."""

    gathers_after: tuple[int, ...] = ()
    """With ``gather: gradients``: gather number i may begin right after reduce-scatter ``gathers_after[i]``, during
    backward. If empty, all begin after the last one."""

    reduce_scatter: AlgorithmName = "ring"
    """The algorithm of the first half on Gloo: ``ring``, Headway's own, ``hierarchical``, its rings within hosts and
    across them, which need as many workers on every host, ``direct``, in which every rank sends to every other one at
    once, ``halving_doubling``, in rounds of which each halves what is added up, for a power of two of workers,
    ``tree``, in as few rounds for any number of them, or ``native``, the process group's."""

    all_gather: AlgorithmName = "ring"
    """The algorithm of the second half on Gloo, one of the same."""

    by_size: tuple[SizeClass, ...] = ()
    """Other algorithms of smaller buckets, in the order of sizes: a bucket has those of the first that is as large as
    it is, and the two above where none is."""

    ring_order: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """In which order ranks stand in Headway's rings; if empty, in that of their numbers. It matters where the way
    between some hosts is slower than their links: those should not be neighbours."""

    wire: Cast | None = None
    """What gradients are cast to where they are sent, null for as they are; parameters are gathered as they are. It
    changes numerics, so it is proposed only to those who permit it (``--allow precision``)."""

    @model_validator(mode="after")
    def _orders_agree(self) -> Self:
        if self.gather_order and sorted(self.gather_order) != list(range(len(self.buckets))):
            raise ValueError("gather_order must name every bucket once")
        if self.wire is not None and self.wire.error_feedback:
            raise ValueError("wire of decoupled must be a cast without error feedback")
        sizes = [each.size_bytes for each in self.by_size]
        if any(before >= after for before, after in pairwise(sizes)):
            raise ValueError("by_size is not in ascending order of size_bytes")
        if self.gathers_after:
            if self.gather != "gradients" or len(self.gathers_after) != len(self.gather_order):
                raise ValueError(
                    "gathers_after needs gather: gradients, and an entry for each of gather_order"
                )
            pairs = zip(self.gather_order, self.gathers_after, strict=True)
            if any(not bucket <= after < len(self.buckets) for bucket, after in pairs):
                raise ValueError("gathers_after lets a bucket be gathered before it is reduced, or never")
        return self

    @property
    def algorithms(self) -> Algorithms:
        """Those of both halves, for buckets of each size."""
        return Algorithms(self.reduce_scatter, self.all_gather, self.by_size, self.ring_order)

    def decide(self, job: Job) -> BucketSchedule:
        """Cut or look up the buckets. Raises PlanError where the named parts are not exactly the model's."""
        model = job.model
        if self.buckets:
            groups = self._looked_up(model)
        else:
            runs = group_by_size(model.ready_parameters(), self.bucket_cap_bytes)
            groups = [[whole_parameter(parameter) for parameter in run] for run in runs]
        buckets = make_buckets(groups, model)
        _refuse(
            "only gradients of real numbers can be cast",
            [each.parameters[0] for each in buckets if self.wire is not None and each.dtype not in FLOATS],
        )
        return BucketSchedule(
            buckets=buckets,
            gather_order=self.gather_order or forward_gather_order(model, buckets),
            gather=self.gather,
            channels=self.channels,
            gathers_after=self.gathers_after,
            algorithms=self.algorithms,
            halves=self.wire,
        )

    def spelled_out(self, job: Job) -> Self:
        """The same decision with its buckets and gather order written out."""
        return self.model_copy(update={**options_of(self.decide(job), job.model), "wire": self.wire})

    def with_buckets(self, schedule: Schedule, job: Job) -> Self | None:
        """The buckets of ``schedule`` in their order, all else as by default; None if it has no buckets."""
        if not isinstance(schedule, BucketSchedule):
            return None
        options = options_of(schedule, job.model) | {"gather_order": ()}
        return type(self).model_validate(options).spelled_out(job)

    def _looked_up(self, model: ModelSpec) -> list[list[Part]]:
        _refuse(
            "a plan bucket is empty", [f"bucket {i}" for i, names in enumerate(self.buckets) if not names]
        )
        groups = [[_parse(text, model) for text in bucket] for bucket in self.buckets]
        _refuse(
            "plan buckets mix dtypes",
            [g[0].parameter for g in groups if len({model.by_name[part.parameter].dtype for part in g}) > 1],
        )
        planned: dict[str, list[Part]] = {parameter.name: [] for parameter in model.parameters}
        for group in groups:
            for part in group:
                planned[part.parameter].append(part)
        _refuse(
            "plan buckets leave out parameters of the model", sorted(n for n, p in planned.items() if not p)
        )
        _refuse(
            "plan buckets do not hold every element of a parameter once",
            sorted(name for name, parts in planned.items() if not _covers(parts, model.by_name[name])),
        )
        return groups

    def describe(self) -> str:
        """Say the strategy in a few words."""
        cap = f"buckets of {self.bucket_cap_bytes / 2**20:g} MiB"
        said = ["decoupled", counted(len(self.buckets), "bucket") if self.buckets else cap]
        said.append(f"gathering {self.gather}{' early' if self.gathers_after else ''}")
        if self.channels > 1:
            said.append(f"{self.channels} channels")
        said += self.algorithms.in_words
        if self.wire is not None:
            said.append(f"gradients sent as {self.wire.describe()}")
        return ", ".join(said)

    @property
    def changes_training(self) -> str:
        """What the cast loses of gradients."""
        return "" if self.wire is None else f"gradients are {self.wire.loses}"

    @property
    def permission(self) -> str:
        """Casts take precision."""
        return "" if self.wire is None else PRECISION


def strategy_of(schedule: BucketSchedule, model: ModelSpec) -> DecoupledStrategy:
    """The strategy that decides ``schedule`` for ``model``."""
    return DecoupledStrategy.model_validate(options_of(schedule, model))


def options_of(schedule: BucketSchedule, model: ModelSpec) -> dict[str, object]:
    """The fields of a DecoupledStrategy that decides ``schedule``."""
    return {
        "buckets": tuple(tuple(_text(part, model) for part in bucket.parts) for bucket in schedule.buckets),
        "gather_order": schedule.gather_order,
        "gather": schedule.gather,
        "channels": schedule.channels,
        "gathers_after": schedule.gathers_after,
        "reduce_scatter": schedule.algorithms.reduce_scatter,
        "all_gather": schedule.algorithms.all_gather,
        "by_size": schedule.algorithms.by_size,
        "ring_order": schedule.algorithms.ring_order,
        "wire": None if schedule.halves is None else schedule.halves.model_dump(mode="json"),
    }


def _text(part: Part, model: ModelSpec) -> str:
    if part == whole_parameter(model.by_name[part.parameter]):
        return part.parameter
    return f"{part.parameter}[{part.start}:{part.end}]"


def _parse(text: str, model: ModelSpec) -> Part:
    match = None if text in model.by_name else _PART.fullmatch(text)
    name = text if match is None else match["name"]
    if name not in model.by_name:
        _refuse("plan buckets name parameters the model lacks", [name])
    if match is None:
        return whole_parameter(model.by_name[name])
    part = Part(name, int(match["start"]), int(match["end"]))
    if not part.start < part.end <= model.by_name[name].numel:
        _refuse("a plan bucket names elements its parameter does not have", [text])
    return part


def _covers(parts: list[Part], parameter: ParameterSpec) -> bool:
    end = 0
    for part in sorted(parts, key=lambda part: part.start):
        if part.start != end:
            return False
        end = part.end
    return end == parameter.numel


def _refuse(problem: str, names: list[str]) -> None:
    if names:
        raise PlanError(
            problem,
            got=", ".join(names[:3]),
            expected="each element of the model's parameters once, one dtype a bucket",
            fix="Record this model again and optimize from that trace.",
        )
