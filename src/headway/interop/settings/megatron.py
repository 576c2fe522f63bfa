"""Plans as Megatron's arguments."""

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
PREFETCH = 2  # as torch's loaders have it by default


def settings(asked: SettingsRequest) -> Settings:
    """Megatron's arguments for buckets, the decoupled all-reduce and 1F1B, plain or interleaved.

    Its distributed optimizer with both overlaps is the decoupled all-reduce of parameters. Raises PlanError for other
    plans, and without the model where there are buckets.
    """
    kinds = (DistributedDataParallelStrategy, ParameterServerStrategy, DecoupledStrategy)
    strategy = bucketed(asked, MEGATRON, kinds)
    arguments: list[str] = []
    gists, lacks, use = [], [], "Add the arguments to those of the training script."
    if asked.pipeline is not None:
        own, gist, lost = _pipeline(asked)
        arguments += own
        gists.append(gist)
        lacks += lost
        use += (
            f" --global-batch-size has to be {asked.pipeline.count() * asked.replicas} times --micro-batch-size: "
            f"{asked.pipeline.count()} micro-batches, {asked.replicas} replicas."
        )
    if strategy is not None:
        size, lack = one_size(asked, strategy, closes_before=False)
        arguments += ["--overlap-grad-reduce", "--ddp-bucket-size", str(size)]
        gists.append(f"buckets of {size:,} elements, reduced under backward")
        lacks += [lack] if lack else []
        lacks.append(
            "the order in which gradients are ready: buckets are filled in the reverse order of registration"
        )
        if asked.pipeline is not None:
            lacks.append(
                "buckets of the stages behind the first: Megatron reduces all of such a stage in one"
            )
        lacks += _of_data(strategy, arguments, gists)
        if "--grad-reduce-in-bf16" not in arguments and _in_bfloat16(asked):
            lacks.append("gradients in bfloat16: under --bf16 Megatron keeps and reduces them in float32")
    passes = _passes(asked.plan.passes)
    arguments += passes.arguments
    gists += passes.gists
    if passes.micro_batches > 1:
        use += (
            f" --micro-batch-size has to be a part in {passes.micro_batches} of the script's batch, and "
            f"--global-batch-size {passes.micro_batches * asked.replicas} times as much: {passes.micro_batches} "
            f"micro-batches, {asked.replicas} replicas."
        )
    lacks += unexpressed(asked, passes.lacks)
    return Settings(MEGATRON, ", ".join(gists), use, tuple(lacks), arguments=tuple(arguments))


def _of_data(strategy: Bucketed, arguments: list[str], gists: list[str]) -> list[str]:
    lacks = []
    if isinstance(strategy, DecoupledStrategy):
        arguments += ["--use-distributed-optimizer", "--overlap-param-gather"]
        gists.append("gathered under the next forward")
        if strategy.gather == "gradients":
            lacks.append("gathered gradients: parameters are gathered, after each rank has updated its share")
        lacks.append(
            "the order of gathers, and how many are in flight: each bucket's forward begins the gather of the next one"
        )
        lacks.append("its rings: collectives are those of the process group")
    elif isinstance(strategy, ParameterServerStrategy):
        lacks.append("servers: each bucket is all-reduced, to the same sums")
    elif any(strategy.wire):
        wire = one_wire(strategy)
        if wire is not None and wire.dtype == "bfloat16":
            arguments.append("--grad-reduce-in-bf16")
            lacks.append(
                "bfloat16 for other models: the argument acts under --bf16, and gradients are kept as such, too"
            )
        else:
            lacks.append("what buckets are sent as: Megatron sends all of them as they are, or as bfloat16")
    return lacks


@dataclass
class _Passes:
    """Arguments for passes, what they do, and what they do not."""

    arguments: list[str] = field(default_factory=list)
    gists: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)
    micro_batches: int = 1


def _passes(passes: Sequence[Pass]) -> _Passes:
    said = _Passes()
    recomputed = sum(len(one.modules) for one in passes if isinstance(one, Recompute))
    if recomputed:
        said.arguments += ["--recompute-granularity", "full", "--recompute-method", "block"]
        said.arguments += ["--recompute-num-layers", str(recomputed)]
        said.lacks.append(
            f"which modules are computed again: Megatron takes as many of its first layers, {recomputed}"
        )
    for pass_ in passes:
        if isinstance(pass_, Accumulate):
            said.micro_batches = pass_.micro_batches
            said.lacks.append("the loss of a whole batch: it is the mean of its parts'")
        elif isinstance(pass_, Recompute):
            pass  # all of them together
        elif isinstance(pass_, Precision) and not pass_.modules:
            said.arguments.append("--bf16" if pass_.dtype == "bfloat16" else "--fp16")
            if pass_.leaves_out_steps:  # under --bf16 it is so by itself
                said.arguments.append("--accumulate-allreduce-grads-in-fp32")
                said.lacks.append("when a scale is changed: Megatron scales losses by its own rule")
            said.lacks.append(
                f"autocast: Megatron keeps parameters in {pass_.dtype} next to their float32, and computes all in it"
            )
        elif isinstance(pass_, InputWorkers):
            said.arguments += ["--num-workers", str(pass_.workers)]
            if pass_.prefetch != PREFETCH:
                said.lacks.append(
                    f"{pass_.prefetch} batches ahead of each loader worker: Megatron's load {PREFETCH}"
                )
        else:
            said.lacks.append(f"the pass {pass_.name}")
            continue
        said.gists.append(pass_.describe())
    return said


def _in_bfloat16(asked: SettingsRequest) -> bool:
    return any(parameter.dtype == "bfloat16" for stage in asked.stages for parameter in stage.parameters)


def _pipeline(asked: SettingsRequest) -> tuple[list[str], str, list[str]]:
    """The arguments of a pipeline, what they do, and what they do not."""
    pipeline, ranks = asked.pipeline, asked.pipeline_ranks
    assert pipeline is not None
    stages = len(asked.plan.stages or ()) or ranks
    arguments = ["--pipeline-model-parallel-size", str(ranks)]
    lacks, order = [], "1F1B"
    if stages > ranks:
        order = "interleaved 1F1B"
        arguments += ["--num-virtual-stages-per-pipeline-rank", str(stages // ranks)]
    plain = pipeline.order == "1f1b" or (pipeline.order == "kfkb" and pipeline.group_size == 1)
    fits = pipeline.order == "interleaved" if stages > ranks else plain
    if not fits:
        lacks.append(f"its order ({pipeline.describe()}): Megatron has {order} for so many stages")
    lacks.append("where stages begin: layers are divided evenly, or as --pipeline-model-parallel-layout says")
    if pipeline.receive_buffers not in (None, 1):
        lacks.append(f"{pipeline.receive_buffers} receive buffers: Megatron decides how many there are")
    return arguments, f"{pipeline.count()} micro-batches through {stages} stages in {order}", lacks
