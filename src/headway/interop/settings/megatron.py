"""Exports plans as Megatron's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.interop.settings.elements import one_size
from headway.interop.settings.request import Bucketed, SettingsRequest, bucketed, one_wire, unexpressed
from headway.passes.accumulate import Accumulate
from headway.passes.base import Pass
from headway.passes.input_workers import InputWorkers
from headway.passes.precision import Precision
from headway.passes.recompute import Recompute
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.parameter_server.policy import ParameterServerStrategy
from headway.tool_settings import Settings

MEGATRON = "Megatron"
PREFETCH = 2  # the default of torch's loaders


def settings(request: SettingsRequest) -> Settings:
    """Megatron's arguments for buckets, the decoupled all-reduce, and plain or interleaved 1F1B.

    Its distributed optimizer with both overlaps is equivalent to the decoupled all-reduce that gathers parameters.
    Raises PlanError for other plans, and for buckets without the model.
    """
    kinds = (DistributedDataParallelStrategy, ParameterServerStrategy, DecoupledStrategy)
    strategy = bucketed(request, MEGATRON, kinds)
    arguments: list[str] = []
    gists, lacks, use = [], [], "Add the arguments to those of the training script."
    if request.pipeline is not None:
        pipeline_arguments, gist, lost = _pipeline(request)
        arguments += pipeline_arguments
        gists.append(gist)
        lacks += lost
        use += (
            f" Set --global-batch-size to {request.pipeline.count() * request.replicas} times --micro-batch-size: "
            f"{request.pipeline.count()} micro-batches, {request.replicas} replicas."
        )
    if strategy is not None:
        size, lack = one_size(request, strategy, closes_before=False)
        arguments += ["--overlap-grad-reduce", "--ddp-bucket-size", str(size)]
        gists.append(f"buckets of {size:,} elements, reduced during backward")
        lacks += [lack] if lack else []
        lacks.append(
            "the order in which gradients become ready: buckets are filled in reverse registration order"
        )
        if request.pipeline is not None:
            lacks.append("buckets of all stages but the first: Megatron reduces each in one piece")
        lacks += _of_data(strategy, arguments, gists)
        if "--grad-reduce-in-bf16" not in arguments and _in_bfloat16(request):
            lacks.append("gradients in bfloat16: with --bf16 Megatron keeps and reduces them in float32")
    passes = _passes(request.plan.passes)
    arguments += passes.arguments
    gists += passes.gists
    if passes.micro_batches > 1:
        use += (
            f" Set --micro-batch-size to the script's batch divided by {passes.micro_batches}, and "
            f"--global-batch-size to {passes.micro_batches * request.replicas} times that: {passes.micro_batches} "
            f"micro-batches, {request.replicas} replicas."
        )
    lacks += unexpressed(request, passes.lacks)
    return Settings(MEGATRON, ", ".join(gists), use, tuple(lacks), arguments=tuple(arguments))


def _of_data(strategy: Bucketed, arguments: list[str], gists: list[str]) -> list[str]:
    lacks = []
    if isinstance(strategy, DecoupledStrategy):
        arguments += ["--use-distributed-optimizer", "--overlap-param-gather"]
        gists.append("gathered during the next forward")
        if strategy.gather == "gradients":
            lacks.append("gathered gradients: each rank updates its share, and then parameters are gathered")
        lacks.append(
            "the order and number of concurrent gathers: each bucket's forward starts the gather of the next one"
        )
        lacks.append("its rings: the process group chooses algorithms")
    elif isinstance(strategy, ParameterServerStrategy):
        lacks.append("servers: each bucket is all-reduced, with the same result")
    elif any(strategy.wire):
        wire = one_wire(strategy)
        if wire is not None and wire.dtype == "bfloat16":
            arguments.append("--grad-reduce-in-bf16")
            lacks.append(
                "bfloat16 for other models: the argument needs --bf16, and also keeps gradients in bfloat16"
            )
        else:
            lacks.append("the wire format of buckets: Megatron only supports none, or bfloat16 for all")
    return lacks


@dataclass
class _Passes:
    """Arguments for passes, their descriptions, and what they leave out."""

    arguments: list[str] = field(default_factory=list)
    gists: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)
    micro_batches: int = 1


def _passes(passes: Sequence[Pass]) -> _Passes:
    settings = _Passes()
    recomputed = sum(len(pass_.modules) for pass_ in passes if isinstance(pass_, Recompute))
    if recomputed:
        settings.arguments += ["--recompute-granularity", "full", "--recompute-method", "block"]
        settings.arguments += ["--recompute-num-layers", str(recomputed)]
        settings.lacks.append(
            f"which modules are recomputed: Megatron recomputes its first {recomputed} layers"
        )
    for pass_ in passes:
        if isinstance(pass_, Accumulate):
            settings.micro_batches = pass_.micro_batches
            settings.lacks.append("the loss of a whole batch: it is the mean of the parts' losses")
        elif isinstance(pass_, Recompute):
            pass  # all of them together
        elif isinstance(pass_, Precision) and not pass_.modules:
            settings.arguments.append("--bf16" if pass_.dtype == "bfloat16" else "--fp16")
            if pass_.leaves_out_steps:  # --bf16 implies it
                settings.arguments.append("--accumulate-allreduce-grads-in-fp32")
                settings.lacks.append("the rule for changing the loss scale: Megatron has its own")
            settings.lacks.append(
                f"autocast: Megatron computes everything in {pass_.dtype}, with float32 copies of parameters"
            )
        elif isinstance(pass_, InputWorkers):
            settings.arguments += ["--num-workers", str(pass_.workers)]
            if pass_.prefetch != PREFETCH:
                settings.lacks.append(
                    f"prefetching {pass_.prefetch} batches per loader worker: Megatron prefetches {PREFETCH}"
                )
        else:
            settings.lacks.append(f"the pass {pass_.name}")
            continue
        settings.gists.append(pass_.describe())
    return settings


def _in_bfloat16(request: SettingsRequest) -> bool:
    return any(parameter.dtype == "bfloat16" for stage in request.stages for parameter in stage.parameters)


def _pipeline(request: SettingsRequest) -> tuple[list[str], str, list[str]]:
    """The arguments of a pipeline, their description, and what they leave out."""
    pipeline, ranks = request.pipeline, request.pipeline_ranks
    assert pipeline is not None
    stages = len(request.plan.stages or ()) or ranks
    arguments = ["--pipeline-model-parallel-size", str(ranks)]
    lacks, order = [], "1F1B"
    if stages > ranks:
        order = "interleaved 1F1B"
        arguments += ["--num-virtual-stages-per-pipeline-rank", str(stages // ranks)]
    plain = pipeline.order == "1f1b" or (pipeline.order == "kfkb" and pipeline.group_size == 1)
    fits = pipeline.order == "interleaved" if stages > ranks else plain
    if not fits:
        lacks.append(f"its order ({pipeline.describe()}): Megatron uses {order} for this number of stages")
    lacks.append("stage boundaries: layers are divided evenly, or by --pipeline-model-parallel-layout")
    if pipeline.receive_buffers not in (None, 1):
        lacks.append(f"{pipeline.receive_buffers} receive buffers: Megatron decides the number")
    return arguments, f"{pipeline.count()} micro-batches through {stages} stages in {order}", lacks
