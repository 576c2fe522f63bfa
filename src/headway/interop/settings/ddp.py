"""Plans as arguments and hooks of torch's DistributedDataParallel."""

from __future__ import annotations

from typing import Any

from headway.errors import PlanError
from headway.interop.settings.python_passes import in_torch, literal, python_file
from headway.interop.settings.request import Bucketed, SettingsRequest, bucketed, one_wire, unexpressed
from headway.scheduling.fusion import MIB, bucket_caps_mb
from headway.strategies.data_parallel.local_sgd.policy import LocalSGDStrategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.parameter_server.policy import ParameterServerStrategy
from headway.tool_settings import Settings

DDP = "DDP"
FILE = "ddp_settings.py"
HOOKS_OF = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
HOOKS = {"float16": "fp16_compress_hook", "bfloat16": "bf16_compress_hook"}
"""Torch's hooks that do what a wire type says, within its rounding: they cast before they divide by the world size."""

_WRAP = """
from torch.nn.parallel import DistributedDataParallel
{imports}
ARGUMENTS = {arguments}
{passes}

def wrap(module, **options):
    \"\"\"The module in DistributedDataParallel, with these arguments in the place of the same in `options`.\"\"\"
{prepare}    wrapped = DistributedDataParallel(module, **{{**options, **ARGUMENTS}}){hook}
    return wrapped
"""

_LOCAL = """
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
{imports}
STEPS = {steps}  # of each rank in a period
{passes}

def wrap(module, **options):
    \"\"\"The module in DistributedDataParallel, whose gradients stay each rank's own.\"\"\"
{prepare}    wrapped = DistributedDataParallel(module, **{{**options, "broadcast_buffers": False}})
    state = PostLocalSGDState(None, None, start_localSGD_iter=0, post_local_gradient_allreduce=False)
    wrapped.register_comm_hook(state, post_localSGD_hook)
    return wrapped


def wrap_optimizer(optimizer, process_group=None):
    \"\"\"The optimizer, after every period of which parameters are averaged. The averager counts steps from 0.\"\"\"
    averager = PeriodicModelAverager(period=STEPS, warmup_steps=STEPS - 1, process_group=process_group)
    return PostLocalSGDOptimizer(optimizer, averager)
"""


def settings(asked: SettingsRequest) -> Settings:
    """DDP's arguments for a plan of buckets, or torch's own local SGD.

    Raises PlanError for other plans, and for buckets by name where no model says how large they are.
    """
    if isinstance(asked.data, LocalSGDStrategy):
        return _local_sgd(asked, asked.data)
    kinds = (DistributedDataParallelStrategy, ParameterServerStrategy, DecoupledStrategy)
    strategy = bucketed(asked, DDP, kinds)
    if strategy is None:
        asked.refuse(DDP, "a strategy along data: DDP knows no stages")
    arguments, lacks = _arguments(asked, strategy)
    hook, lost = _hook(strategy)
    told = in_torch(asked.plan.passes)
    lacks += [*_of_pipeline(asked), *lost, *unexpressed(asked, told.lacks)]
    gist = ", ".join([_gist(arguments), *told.gists]) + (f", and the hook {hook}" if hook else "")
    body = _WRAP.format(
        arguments=literal(arguments),
        imports=told.imports + (f"from {HOOKS_OF} import {hook}\n" if hook else ""),
        passes=told.code,
        prepare=told.call("module"),
        hook=f"\n    wrapped.register_comm_hook(wrapped.process_group, {hook})" if hook else "",
    )
    use = f"Wrap the model with wrap() of {FILE}, in the place of DistributedDataParallel.{told.use}"
    if "bucket_cap_mb_list" in arguments:
        use += " Torch 2.13 or newer takes a cap for each bucket."
    if hook == HOOKS["bfloat16"]:
        use += " Torch refuses this hook on Gloo."
    text = python_file(f"{DDP}, {gist}", tuple(lacks), body)
    return Settings(DDP, gist, use, tuple(lacks), files={FILE: text})


def _of_pipeline(asked: SettingsRequest) -> list[str]:
    if asked.pipeline is None:
        return []
    return [
        f"the order of micro-batches ({asked.pipeline.describe()}), which is for torch.distributed.pipelining: "
        "its schedule is constructed with it"
    ]


def _hook(strategy: Bucketed) -> tuple[str, list[str]]:
    """The hook that sends buckets as the strategy says, "" for none, and what of it none does."""
    if not isinstance(strategy, DistributedDataParallelStrategy) or not any(strategy.wire):
        return "", []
    wire = one_wire(strategy)
    if wire is not None and wire.dtype in HOOKS:
        return HOOKS[wire.dtype], []
    return "", [
        "what buckets are sent as: torch's hooks send all of them as float16 or bfloat16, and here they are sent as "
        "they are"
    ]


def _arguments(asked: SettingsRequest, strategy: Bucketed) -> tuple[dict[str, Any], list[str]]:
    """What DDP is given for its buckets, and what of the strategy that is not."""
    if isinstance(strategy, DecoupledStrategy):
        return _nearest(asked, strategy)
    lacks = []
    if isinstance(strategy, ParameterServerStrategy):
        lacks.append("servers: each bucket is all-reduced, to the same sums")
        strategy = strategy.bucketing()
    if len(strategy.bucket_caps_mb) > 1:
        return {"bucket_cap_mb_list": list(strategy.bucket_caps_mb)}, lacks
    return {"bucket_cap_mb": (*strategy.bucket_caps_mb, strategy.bucket_cap_mb)[0]}, lacks


def _nearest(asked: SettingsRequest, strategy: DecoupledStrategy) -> tuple[dict[str, Any], list[str]]:
    """The same buckets, all-reduced under backward."""
    kept = " and keeps all of the optimizer's state" if strategy.gather == "parameters" else ""
    lacks = [
        f"the decoupling: DDP all-reduces each bucket under backward{kept}; nothing is left for the next forward"
    ]
    if len(asked.stages) > 1 or not (strategy.buckets or asked.stages):
        lacks.append(
            "where buckets end: DDP closes one when it has reached the cap, the plan before it would be"
        )
        return {"bucket_cap_mb": strategy.bucket_cap_bytes / MIB}, lacks
    (model,) = asked.models("its buckets name parameters, and DDP wants sizes")
    (schedule,) = asked.schedules("")
    if model.find_unused_parameters:
        lacks.append(
            "where buckets end: with find_unused_parameters DDP cuts them in the order of registration, by one cap"
        )
        return {"bucket_cap_mb": model.size_bytes / len(schedule.buckets) / MIB}, lacks
    try:
        caps = bucket_caps_mb([list(bucket.parts) for bucket in schedule.buckets], model)
    except PlanError as refusal:
        lacks.append(f"where buckets end: one cap makes about as many of them ({refusal})")
        return {"bucket_cap_mb": model.size_bytes / len(schedule.buckets) / MIB}, lacks
    return {"bucket_cap_mb_list": list(caps)}, lacks


def _gist(arguments: dict[str, Any]) -> str:
    caps = arguments.get("bucket_cap_mb_list")
    if caps:
        return f"bucket_cap_mb_list with caps for {len(caps)} bucket{'s' * (len(caps) > 1)}"
    cap = arguments["bucket_cap_mb"]
    return "its default buckets" if cap is None else f"bucket_cap_mb={cap:g}"


def _local_sgd(asked: SettingsRequest, strategy: LocalSGDStrategy) -> Settings:
    lacks = []
    if strategy.outer is not None:
        lacks.append("the outer optimizer: ranks go on with the mean of their models, so it trains otherwise")
    if strategy.moments == "averaged":
        lacks.append("the optimizer's state: it stays each rank's own")
    if strategy.buffers == "averaged":
        lacks.append("the buffers of normalisation layers: they stay each rank's own")
    told = in_torch(asked.plan.passes)
    lacks += [*_of_pipeline(asked), *unexpressed(asked, told.lacks)]
    gist = ", ".join([f"torch's local SGD with a period of {strategy.steps} steps", *told.gists])
    use = f"Wrap the model with wrap() and its optimizer with wrap_optimizer() of {FILE}.{told.use}"
    body = _LOCAL.format(
        steps=strategy.steps, imports=told.imports, passes=told.code,
        prepare=told.call("module"),
    )  # fmt: skip
    text = python_file(gist, tuple(lacks), body)
    return Settings(DDP, gist, use, tuple(lacks), files={FILE: text})
