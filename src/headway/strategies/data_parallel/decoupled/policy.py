"""Policy of the decoupled all-reduce (DeAR, arXiv 2302.12445): buckets, and the order of their gathers."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from headway.errors import PlanError
from headway.model import ModelSpec
from headway.scheduling.buckets import BucketSchedule, forward_gather_order, group_by_size, make_buckets
from headway.strategies.base import Strategy

DEFAULT_CAP_BYTES = 4 * 2**20


class DecoupledStrategy(Strategy):
    """Reduce-scatter under backward, all-gather under the next forward.

    ``buckets`` names the parameters of each bucket in the order of reduction; where it is empty, buckets of
    ``bucket_cap_bytes`` are cut from the order in which gradients become ready. ``gather_order`` holds bucket
    indices in the order of the next forward, and follows from the model where it is empty.
    """

    name: ClassVar[str] = "decoupled"

    bucket_cap_bytes: int = Field(default=DEFAULT_CAP_BYTES, gt=0)
    buckets: tuple[tuple[str, ...], ...] = ()
    gather_order: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _orders_agree(self) -> Self:
        if self.gather_order and sorted(self.gather_order) != list(range(len(self.buckets))):
            raise ValueError("gather_order must name every bucket once")
        return self

    def decide(self, model: ModelSpec) -> BucketSchedule:
        """Cut or look up the buckets. Raises PlanError where named parameters are not exactly the model's."""
        if self.buckets:
            groups = [[model.by_name[name] for name in names] for names in self._checked(model)]
        else:
            groups = group_by_size(model.ready_parameters(), self.bucket_cap_bytes)
        buckets = make_buckets(groups)
        return BucketSchedule(buckets, self.gather_order or forward_gather_order(model, buckets))

    def spelled_out(self, model: ModelSpec) -> DecoupledStrategy:
        """The same decision with its buckets and gather order written out, as a plan file holds it."""
        schedule = self.decide(model)
        return DecoupledStrategy(
            bucket_cap_bytes=self.bucket_cap_bytes,
            buckets=tuple(bucket.parameters for bucket in schedule.buckets),
            gather_order=schedule.gather_order,
        )

    def _checked(self, model: ModelSpec) -> tuple[tuple[str, ...], ...]:
        empty = [index for index, names in enumerate(self.buckets) if not names]
        if empty:
            raise PlanError(
                "a plan bucket is empty", got=f"bucket {empty[0]}", expected="one parameter or more",
                fix="Remove it, and number gather_order anew.",
            )  # fmt: skip
        planned = [name for names in self.buckets for name in names]
        trained = set(model.by_name)
        for problem, names in (
            ("plan buckets name parameters the model lacks", sorted(set(planned) - trained)),
            ("plan buckets leave out parameters of the model", sorted(trained - set(planned))),
            ("plan buckets name a parameter twice", sorted({n for n in planned if planned.count(n) > 1})),
            ("plan buckets mix dtypes", self._mixed(model)),
        ):
            if names:
                raise PlanError(
                    problem,
                    got=", ".join(names[:3]),
                    expected="each of the model's parameters once, one dtype a bucket",
                    fix="Record this model again and optimize from that trace.",
                )
        return self.buckets

    def _mixed(self, model: ModelSpec) -> list[str]:
        return [
            names[0]
            for names in self.buckets
            if len({model.by_name[name].dtype for name in names if name in model.by_name}) > 1
        ]

    def describe(self) -> str:
        """Say the strategy in a few words."""
        count = f"{len(self.buckets)} buckets" if self.buckets else "buckets"
        return f"decoupled, {count} of {self.bucket_cap_bytes / 2**20:g} MiB"
