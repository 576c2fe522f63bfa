"""Plans as a part of DeepSpeed's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway import files
from headway.interop.settings.elements import one_size
from headway.interop.settings.python_passes import InTorch, in_torch, python_file
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


def settings(asked: SettingsRequest) -> Settings:
    """ZeRO of stage 1 with buckets of the plan's size, and a pipeline's micro-batches.

    Stage 1 reduces gradients in buckets under backward, once a step. Without ZeRO, DeepSpeed reduces after backward in
    pieces of a size that nothing changes; stage 2 reduces in every backward that gradients are accumulated over. Raises
    PlanError for other plans, and without the model where there are buckets.
    """
    kinds = (DistributedDataParallelStrategy, ParameterServerStrategy, DecoupledStrategy)
    strategy = bucketed(asked, DEEPSPEED, kinds)
    written: dict[str, Any] = {}
    gists, lacks = [], []
    if asked.pipeline is not None:
        written["gradient_accumulation_steps"] = asked.pipeline.count()
        gists.append(f"{asked.pipeline.count()} micro-batches through {asked.pipeline_ranks} stages in 1F1B")
        lacks += _of_pipeline(asked)  # which has no passes
    if strategy is not None:
        size, lack = one_size(asked, strategy, closes_before=True)
        written["zero_optimization"] = _zero(size)
        gists.append(f"ZeRO stage 1 with buckets of {size:,} elements")
        lacks += [lack] if lack else []
        lacks += _of_data(strategy, written)
        if asked.pipeline is not None:
            lacks.append("reductions under the last backward: DeepSpeed's pipeline reduces after it")
    in_json, by_script = _of_passes(asked.plan.passes, written)
    told = in_torch(by_script)
    gists += [*in_json.gists, *told.gists]
    lacks += unexpressed(asked, (*in_json.lacks, *told.lacks))
    use = f"Merge {FILE} into the configuration, which has to say the size of batches.{in_json.use}"
    if strategy is not None:
        use += " Versions of DeepSpeed that ignore overlap_comm in stage 1 reduce after backward."
    if asked.pipeline is not None:
        use += f" Construct PipelineModule(num_stages={asked.pipeline_ranks})."
    texts = {FILE: files.dump_json(written)}
    if told.code:
        use += (
            f" Call prepare(model) of {PASSES_FILE} before deepspeed.initialize()." if told.prepares else ""
        )
        use += told.use
        texts[PASSES_FILE] = python_file(
            f"{DEEPSPEED}, {', '.join(told.gists)}", told.lacks, f"{told.imports}\n{told.code}"
        )
    return Settings(DEEPSPEED, ", ".join(gists), use, tuple(lacks), files=texts)


def _of_passes(passes: Sequence[Pass], written: dict[str, Any]) -> tuple[InTorch, list[Pass]]:
    """What the configuration says of passes, and those that are the script's to carry out."""
    gists, uses, lacks, others = [], [], [], []
    for pass_ in passes:
        if isinstance(pass_, Accumulate):
            written["gradient_accumulation_steps"] = pass_.micro_batches
            gists.append(pass_.describe())
            uses.append(
                f" train_micro_batch_size_per_gpu is the script's batch divided by {pass_.micro_batches}."
            )
            lacks.append(
                "parts of a batch: the script hands them on one by one, and what is trained is the mean of their losses"
            )
        elif isinstance(pass_, Precision) and not pass_.modules and not pass_.leaves_out_steps:
            # Gradients are sent as they are: of no module in the lower precision.
            written["torch_autocast"] = {
                "enabled": True, "dtype": pass_.dtype, "lower_precision_safe_modules": [],
            }  # fmt: skip
            gists.append(pass_.describe())
            uses.append(" Versions of DeepSpeed that do not know torch_autocast compute in float32.")
            lacks.append("float32 outputs: a loss behind the model is computed from what autocast leaves")
            if written.pop("communication_data_type", None) is not None:
                lacks.append("what buckets are sent as: under torch_autocast they are sent as they are")
        else:
            others.append(pass_)
    return InTorch(gists=tuple(gists), use="".join(uses), lacks=tuple(lacks)), others


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
        lacks = ["gathers under the next forward: step() gathers parameters and waits for them"]
        if strategy.gather == "gradients":
            lacks.append("gathered gradients: parameters are gathered, after each rank has updated its share")
        return lacks
    lacks = [
        "all-reduces: sums are scattered under backward, and step() gathers parameters and waits for them"
    ]
    if isinstance(strategy, ParameterServerStrategy):
        return ["servers: sums are those of the process group", *lacks]
    if any(strategy.wire):
        wire = one_wire(strategy)
        if wire is not None and wire.dtype in WIRES:
            written["communication_data_type"] = WIRES[wire.dtype]
        else:
            lacks.append(
                "what buckets are sent as: all of them are sent as one of float16, bfloat16 or float32"
            )
    return lacks


def _of_pipeline(asked: SettingsRequest) -> list[str]:
    pipeline = asked.pipeline
    assert pipeline is not None
    lacks = []
    stages = len(asked.plan.stages or ())
    if stages > asked.pipeline_ranks:
        lacks.append(f"{stages} stages on {asked.pipeline_ranks} ranks: each rank has one")
    if pipeline.order != "1f1b" and not (pipeline.order == "kfkb" and pipeline.group_size == 1):
        lacks.append(f"its order ({pipeline.describe()}): DeepSpeed has 1F1B alone")
    lacks.append("where stages begin: PipelineModule cuts by partition_method")
    if pipeline.receive_buffers not in (None, 1):
        lacks.append(f"{pipeline.receive_buffers} receive buffers: DeepSpeed decides how many there are")
    return lacks
