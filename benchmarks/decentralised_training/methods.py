"""Methods, each a plan: one line each. Several options of one are tried, and the fastest of them is the method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.parameter_server.policy import ParameterServerStrategy
from headway.strategies.partial_all_reduce.policy import PartialAllReduceStrategy

Bound = Literal["all-reduce", "decoupled", "none"]
CAPS_MB = (2.5, 10.0, 25.0, 50.0)  # of the unscaled model
DEFAULT_CAPS_MB = (1.0, 25.0)
MIB = 2**20
HOSTS, PER_HOST = 4, 4  # of the cases of throughput


@dataclass(frozen=True)
class Method:
    """``options`` gives what is tried, where sizes are those of the unscaled model times ``scale``.

    ``is_choice``: whether it is one of those between which a prediction chooses what ``headway`` is.
    """

    name: str
    bound: Bound
    options: Callable[[float], Sequence[Strategy]]
    is_choice: bool = False


def _ddp(scale: float) -> Sequence[Strategy]:
    return [DistributedDataParallelStrategy(bucket_caps_mb=(cap * scale,)) for cap in CAPS_MB]


def _ddp_default(scale: float) -> Sequence[Strategy]:
    return [DistributedDataParallelStrategy(bucket_caps_mb=tuple(cap * scale for cap in DEFAULT_CAPS_MB))]


def _decoupled(scale: float) -> Sequence[Strategy]:
    return [DecoupledStrategy(bucket_cap_bytes=max(1, round(cap * scale * MIB))) for cap in CAPS_MB]


def _servers(scale: float) -> Sequence[Strategy]:
    return [ParameterServerStrategy(bucket_cap_mb=cap * scale) for cap in CAPS_MB]


def _partial(
    groups: str, staleness: Literal[0, 1], group_size: int | None = None, lateness: float | None = None
) -> Callable[[float], Sequence[Strategy]]:
    return lambda _scale: [
        PartialAllReduceStrategy(
            groups=groups, staleness=staleness, group_size=group_size, lateness_threshold=lateness
        )
    ]


def _static_hosts(_scale: float) -> Sequence[Strategy]:
    return [
        PartialAllReduceStrategy(
            groups="static", staleness=1, group_size=2, within_hosts="all-reduce", hosts=(PER_HOST,) * HOSTS
        )
    ]


METHODS = (
    Method("all-reduce", "all-reduce", _ddp_default),
    Method("all-reduce-tuned", "all-reduce", _ddp),
    Method("decoupled", "decoupled", _decoupled),
    Method("parameter-server", "all-reduce", _servers),
    Method("ad-psgd", "none", _partial("pairs", 1)),
    Method("static", "none", _partial("static", 0), is_choice=True),
    Method("static-stale", "none", _partial("static", 1), is_choice=True),
    Method("static-hosts-stale", "none", _static_hosts, is_choice=True),
    Method("first-come", "none", _partial("first-come", 0, 4), is_choice=True),
    Method("first-come-stale", "none", _partial("first-come", 1, 4), is_choice=True),
    Method("global-division", "none", _partial("global-division", 0, 4), is_choice=True),
    Method("inter-intra-stale", "none", _partial("inter-intra", 1, 4), is_choice=True),
    Method("inter-intra-punctual", "none", _partial("inter-intra", 1, 4, 1.0), is_choice=True),
)
BASELINE, REFERENCE = "all-reduce", "ad-psgd"


def method_named(name: str) -> Method:
    """The method of this name."""
    return next(method for method in METHODS if method.name == name)


def is_partial(strategy: Strategy) -> bool:
    """Whether ranks go through their iterations by themselves."""
    return isinstance(strategy, PartialAllReduceStrategy)
