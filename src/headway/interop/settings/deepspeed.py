"""Exports plans as part of a DeepSpeed configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway import files
from headway.interop.settings.elements import one_size
from headway.interop.settings.python_passes import TorchCode, python_file, torch_code
from headway.interop.settings.request import Bucketed, SettingsRequest, bucketed, one_wire, unexpressed
from headway.passes.accumulate import Accumulate
from headway.passes.base import Pass
from headway.passes.precision import Precision
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.parameter_server.policy import ParameterServerStrategy
from headway.tool_settings import Settings

DEEPSPEED = "DeepSpeed"
FILE = "deepspeed.json"
PASSES_FILE = "deepspeed_passes.py"
WIRES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
ALIGNMENT = 2  # of allgather_bucket_size; ZeRO asserts that it is a multiple


def settings(request: SettingsRequest) -> Settings:
    """ZeRO stage 1 with buckets of the plan's size, and a pipeline's micro-batches.

    Stage 1 reduces gradients in buckets during backward, once per step. Without ZeRO, DeepSpeed reduces after backward
    in pieces of a fixed size; stage 2 reduces in every backward of gradient accumulation. Raises PlanError for other
    plans, and for buckets without the model.
    """
    kinds = (DistributedDataParallelStrategy, ParameterServerStrategy, DecoupledStrategy)
    strategy = bucketed(request, DEEPSPEED, kinds)
    written: dict[str, Any] = {}
    gists, lacks = [], []
    if request.pipeline is not None:
        written["gradient_accumulation_steps"] = request.pipeline.count()
        gists.append(
            f"{request.pipeline.count()} micro-batches through {request.pipeline_ranks} stages in 1F1B"
        )
        lacks += _of_pipeline(request)  # which has no passes
    if strategy is not None:
        size, lack = one_size(request, strategy, closes_before=True)
        written["zero_optimization"] = _zero(size)
        gists.append(f"ZeRO stage 1 with buckets of {size:,} elements")
        lacks += [lack] if lack else []
        lacks += _of_data(strategy, written)
        if request.pipeline is not None:
            lacks.append("reductions during the last backward: DeepSpeed's pipeline reduces after it")
    in_json, by_script = _of_passes(request.plan.passes, written)
    in_script = torch_code(by_script)
    gists += [*in_json.gists, *in_script.gists]
    lacks += unexpressed(request, (*in_json.lacks, *in_script.lacks))
    use = f"Merge {FILE} into the configuration, which must set the batch sizes.{in_json.use}"
    if strategy is not None:
        use += " Versions of DeepSpeed that ignore overlap_comm in stage 1 reduce after backward."
    if request.pipeline is not None:
        use += f" Construct PipelineModule(num_stages={request.pipeline_ranks})."
    texts = {FILE: files.dump_json(written)}
    if in_script.code:
        use += (
            f" Call prepare(model) of {PASSES_FILE} before deepspeed.initialize()."
            if in_script.prepares
            else ""
        )
        use += in_script.use
        texts[PASSES_FILE] = python_file(
            f"{DEEPSPEED}, {', '.join(in_script.gists)}",
            in_script.lacks,
            f"{in_script.imports}\n{in_script.code}",
        )
    return Settings(DEEPSPEED, ", ".join(gists), use, tuple(lacks), files=texts)


def _of_passes(passes: Sequence[Pass], written: dict[str, Any]) -> tuple[TorchCode, list[Pass]]:
    """The configuration of passes, and the passes that the script has to apply."""
    gists, uses, lacks, by_script = [], [], [], []
    for pass_ in passes:
        if isinstance(pass_, Accumulate):
            written["gradient_accumulation_steps"] = pass_.micro_batches
            gists.append(pass_.describe())
            uses.append(
                f" Set train_micro_batch_size_per_gpu to the script's batch divided by {pass_.micro_batches}."
            )
            lacks.append(
                "splitting a batch: the script passes its parts one by one, and their mean loss is trained"
            )
        elif isinstance(pass_, Precision) and not pass_.modules and not pass_.leaves_out_steps:
            # No module's gradients are communicated in the lower precision.
            written["torch_autocast"] = {
                "enabled": True, "dtype": pass_.dtype, "lower_precision_safe_modules": [],
            }  # fmt: skip
            gists.append(pass_.describe())
            uses.append(" Versions of DeepSpeed without torch_autocast compute in float32.")
            lacks.append("float32 outputs: the loss is computed from autocast's outputs")
            if written.pop("communication_data_type", None) is not None:
                lacks.append("the wire format of buckets: torch_autocast does not change it")
        else:
            by_script.append(pass_)
    return TorchCode(gists=tuple(gists), use="".join(uses), lacks=tuple(lacks)), by_script


def _zero(size: int) -> dict[str, Any]:
    return {
        "stage": 1,
        "reduce_bucket_size": size,
        "allgather_bucket_size": -(-size // ALIGNMENT) * ALIGNMENT,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_scatter": True,
    }


def _of_data(strategy: Bucketed, written: dict[str, Any]) -> list[str]:
    if isinstance(strategy, DecoupledStrategy):
        lacks = ["gathers during the next forward: step() gathers parameters and waits for them"]
        if strategy.gather == "gradients":
            lacks.append("gathered gradients: each rank updates its share, and then parameters are gathered")
        return lacks
    lacks = [
        "all-reduces: gradients are reduce-scattered during backward, and step() gathers parameters and waits"
    ]
    if isinstance(strategy, ParameterServerStrategy):
        return ["servers: the process group reduces gradients", *lacks]
    if any(strategy.wire):
        wire = one_wire(strategy)
        if wire is not None and wire.dtype in WIRES:
            written["communication_data_type"] = WIRES[wire.dtype]
        else:
            lacks.append(
                "the wire format of buckets: DeepSpeed has one for all: float16, bfloat16 or float32"
            )
    return lacks


def _of_pipeline(request: SettingsRequest) -> list[str]:
    pipeline = request.pipeline
    assert pipeline is not None
    lacks = []
    stages = len(request.plan.stages or ())
    if stages > request.pipeline_ranks:
        lacks.append(f"{stages} stages on {request.pipeline_ranks} ranks: each rank has one")
    if pipeline.order != "1f1b" and not (pipeline.order == "kfkb" and pipeline.group_size == 1):
        lacks.append(f"its order ({pipeline.describe()}): DeepSpeed only has 1F1B")
    lacks.append("stage boundaries: PipelineModule cuts by partition_method")
    if pipeline.receive_buffers not in (None, 1):
        lacks.append(f"{pipeline.receive_buffers} receive buffers: DeepSpeed decides the number")
    return lacks
