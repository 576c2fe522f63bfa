"""Exports plans as arguments and hooks of torch's DistributedDataParallel."""

from __future__ import annotations

from typing import Any

from headway.errors import PlanError
from headway.interop.settings.python_passes import literal, python_file, torch_code
from headway.interop.settings.request import Bucketed, SettingsRequest, bucketed, one_wire, unexpressed
from headway.scheduling.fusion import MIB, bucket_caps_mb
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.parameter_server.policy import ParameterServerStrategy
from headway.tool_settings import Settings

DDP = "DDP"
FILE = "ddp_settings.py"
HOOKS_OF = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
HOOKS = {"float16": "fp16_compress_hook", "bfloat16": "bf16_compress_hook"}
"""Torch's hooks for each wire type. They match it up to rounding: they cast before dividing by the world size."""

_WRAP = """
from torch.nn.parallel import DistributedDataParallel
{imports}
ARGUMENTS = {arguments}
{passes}

def wrap(module, **options):
    \"\"\"Wrap the module in DistributedDataParallel; ARGUMENTS override `options`.\"\"\"
{prepare}    wrapped = DistributedDataParallel(module, **{{**options, **ARGUMENTS}}){hook}
    return wrapped
"""


def settings(request: SettingsRequest) -> Settings:
    """DDP's arguments for a plan with buckets.

    Raises PlanError for other plans, and for buckets of named parameters if their sizes are unknown.
    """
    kinds = (DistributedDataParallelStrategy, ParameterServerStrategy, DecoupledStrategy)
    strategy = bucketed(request, DDP, kinds)
    if strategy is None:
        request.refuse(DDP, "a strategy along data: DDP has no stages")
    arguments, lacks = _arguments(request, strategy)
    hook, lost = _hook(strategy)
    in_script = torch_code(request.plan.passes)
    lacks += [*of_pipeline(request), *lost, *unexpressed(request, in_script.lacks)]
    gist = ", ".join([_gist(arguments), *in_script.gists]) + (f", and the hook {hook}" if hook else "")
    body = _WRAP.format(
        arguments=literal(arguments),
        imports=in_script.imports + (f"from {HOOKS_OF} import {hook}\n" if hook else ""),
        passes=in_script.code,
        prepare=in_script.call("module"),
        hook=f"\n    wrapped.register_comm_hook(wrapped.process_group, {hook})" if hook else "",
    )
    use = f"Wrap the model with wrap() of {FILE} instead of DistributedDataParallel.{in_script.use}"
    if "bucket_cap_mb_list" in arguments:
        use += " Caps for each bucket need torch 2.13 or newer."
    if hook == HOOKS["bfloat16"]:
        use += " Torch does not support this hook on Gloo."
    text = python_file(f"{DDP}, {gist}", tuple(lacks), body)
    return Settings(DDP, gist, use, tuple(lacks), files={FILE: text})


def of_pipeline(request: SettingsRequest) -> list[str]:
    """The parts of a plan's pipelines that DDP does not support."""
    if request.pipeline is None:
        return []
    return [
        f"the order of micro-batches ({request.pipeline.describe()}): pass it to the schedule of "
        "torch.distributed.pipelining"
    ]


def _hook(strategy: Bucketed) -> tuple[str, list[str]]:
    """The hook for the strategy's wire format ("" for none), and what it leaves out."""
    if not isinstance(strategy, DistributedDataParallelStrategy) or not any(strategy.wire):
        return "", []
    wire = one_wire(strategy)
    if wire is not None and wire.dtype in HOOKS:
        return HOOKS[wire.dtype], []
    return "", [
        "the wire format of buckets: torch's hooks only support float16 or bfloat16 for all, so none is used"
    ]


def _arguments(request: SettingsRequest, strategy: Bucketed) -> tuple[dict[str, Any], list[str]]:
    """DDP's arguments for its buckets, and what they leave out of the strategy."""
    if isinstance(strategy, DecoupledStrategy):
        return _nearest(request, strategy)
    lacks = []
    if isinstance(strategy, ParameterServerStrategy):
        lacks.append("servers: each bucket is all-reduced, with the same result")
        strategy = DistributedDataParallelStrategy(bucket_cap_mb=strategy.bucket_cap_mb)
    if len(strategy.bucket_caps_mb) > 1:
        return {"bucket_cap_mb_list": list(strategy.bucket_caps_mb)}, lacks
    return {"bucket_cap_mb": (*strategy.bucket_caps_mb, strategy.bucket_cap_mb)[0]}, lacks


def _nearest(request: SettingsRequest, strategy: DecoupledStrategy) -> tuple[dict[str, Any], list[str]]:
    """The same buckets, all-reduced during backward."""
    kept = " and keeps the whole optimizer state" if strategy.gather == "parameters" else ""
    lacks = [
        f"the decoupling: DDP all-reduces each bucket during backward{kept}, none of it in the next forward"
    ]
    if len(request.stages) > 1 or not (strategy.buckets or request.stages):
        lacks.append(
            "bucket boundaries: DDP closes a bucket when it reaches the cap, the plan before it exceeds it"
        )
        return {"bucket_cap_mb": strategy.bucket_cap_bytes / MIB}, lacks
    (model,) = request.models("its buckets name parameters, and DDP needs sizes")
    (schedule,) = request.schedules("")
    if model.find_unused_parameters:
        lacks.append(
            "bucket boundaries: with find_unused_parameters DDP fills buckets in registration order, with one cap"
        )
        return {"bucket_cap_mb": model.size_bytes / len(schedule.buckets) / MIB}, lacks
    try:
        caps = bucket_caps_mb([list(bucket.parts) for bucket in schedule.buckets], model)
    except PlanError as refusal:
        lacks.append(f"bucket boundaries: one cap gives about as many buckets ({refusal})")
        return {"bucket_cap_mb": model.size_bytes / len(schedule.buckets) / MIB}, lacks
    return {"bucket_cap_mb_list": list(caps)}, lacks


def _gist(arguments: dict[str, Any]) -> str:
    caps = arguments.get("bucket_cap_mb_list")
    if caps:
        return f"bucket_cap_mb_list with caps for {len(caps)} bucket{'s' * (len(caps) > 1)}"
    cap = arguments["bucket_cap_mb"]
    return "its default buckets" if cap is None else f"bucket_cap_mb={cap:g}"
