"""All that a package imports to bring Headway a strategy, a pass, a codec or a reader.

These names stay, with what they do, as long as ``API_VERSION`` is the same. A plug-in says which version it was written
for (``api_version``); Headway refuses one that was written for another. ``headway.ext.testing`` has checks for its
tests. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headway.bound import StepBound, bound_of
from headway.cluster import Cluster, CodecCost, Host
from headway.collectives.algorithms import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from headway.compression.codec import (
    Codec,
    Exchange,
    FedBack,
    Gradients,
    Reduced,
    Reduction,
    Sent,
    Shape,
    computed_in,
    element_bytes,
    passes_us,
)
from headway.errors import (
    CommunicationError,
    HeadwayWarning,
    LaunchError,
    PlanError,
    PluginError,
    TraceError,
    UnsupportedError,
    UserError,
)
from headway.graph.build import GraphBuilder, RankCursor
from headway.graph.computation import Item, Part, Point, Timeline
from headway.graph.step_layout import InRecordedOrder, StepLayout
from headway.interop.readers.foreign import (
    MAX_EVENTS,
    Companion,
    Document,
    ForeignRank,
    Reading,
    damaged,
)
from headway.interop.readers.formats import Reader
from headway.interop.readers.ranks import rank_in_name
from headway.job import Job, MeasuredEffect
from headway.model import ModelSpec, ParameterSpec, PassMemory
from headway.passes.base import Pass, whole_model, with_timelines
from headway.passes.measured import MeasuredModules, MeasuredPass
from headway.permission import ASYNCHRONOUS, LOCAL_STEPS, PRECISION, RANDOMNESS, Permission
from headway.plugins import API_VERSION
from headway.scheduling.buckets import Bucket, BucketReadiness, BucketSchedule, make_buckets
from headway.scheduling.buckets import whole_parameter as whole
from headway.scheduling.schedule import HorizonSchedule
from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.footprint import Footprint
from headway.strategies.horizon import Outcome
from headway.strategies.injection import Injection, ScheduleInjection
from headway.strategies.plugin import InForce, Proposal, StrategyPlugin
from headway.tool_settings import Settings
from headway.trace.events import Event, Events, Kind, Stream, texts
from headway.units import counted, format_bytes

if TYPE_CHECKING:
    from headway.trace.format import Trace

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_TO_ALL",
    "API_VERSION",
    "ASYNCHRONOUS",
    "LOCAL_STEPS",
    "MAX_EVENTS",
    "PRECISION",
    "RANDOMNESS",
    "REDUCE_SCATTER",
    "Bucket",
    "BucketReadiness",
    "BucketSchedule",
    "Cluster",
    "Codec",
    "CodecCost",
    "CommunicationError",
    "Companion",
    "DistributedDataParallelStrategy",
    "Document",
    "Event",
    "Events",
    "Exchange",
    "FedBack",
    "Footprint",
    "ForeignRank",
    "Gradients",
    "GraphBuilder",
    "HeadwayWarning",
    "HorizonSchedule",
    "Host",
    "InForce",
    "InRecordedOrder",
    "Injection",
    "Item",
    "Job",
    "Kind",
    "LaunchError",
    "MeasuredEffect",
    "MeasuredModules",
    "MeasuredPass",
    "ModelSpec",
    "Outcome",
    "ParameterSpec",
    "Part",
    "Pass",
    "PassMemory",
    "Permission",
    "PlanError",
    "PluginError",
    "Point",
    "Proposal",
    "RankCursor",
    "Reader",
    "Reading",
    "Reduced",
    "Reduction",
    "ScheduleInjection",
    "Sent",
    "Settings",
    "Shape",
    "StepBound",
    "StepLayout",
    "Strategy",
    "StrategyPlugin",
    "Stream",
    "Timeline",
    "TraceError",
    "UnsupportedError",
    "UserError",
    "bound_of",
    "computed_in",
    "counted",
    "damaged",
    "element_bytes",
    "format_bytes",
    "make_buckets",
    "measure_pass",
    "passes_us",
    "rank_in_name",
    "texts",
    "whole",
    "whole_model",
    "with_timelines",
]


def measure_pass(
    arguments: Sequence[str], pass_for: Callable[[Trace, tuple[str, ...]], MeasuredPass] | None = None
) -> int:
    """Measure what a pass does to a job, from ``arguments`` TRACE [WORD ...] -- COMMAND; returns the exit status.

    The command runs four times, in turn as it is and with the pass; the result is saved in the trace's folder.
    ``pass_for`` makes the pass from the trace and the words, and raises UserError for unknown words. By default the
    words are the pass's name and its options, such as ``block=64``.
    """
    from headway.measuring.passes import measure_arguments, pass_of

    return measure_arguments(arguments, pass_for or pass_of)
