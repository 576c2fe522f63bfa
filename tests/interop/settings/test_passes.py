"""Passes in the words of other tools: code that does the same, arguments, and what is left out."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.interop.settings.plans import of_tables, with_passes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway.interop.settings import ddp, deepspeed, fsdp2, megatron, nccl
from headway.interop.settings.request import CollectiveOptions
from headway.passes.accumulate import Accumulate
from headway.passes.base import Pass
from headway.passes.compile import Compile
from headway.passes.input_workers import InputWorkers
from headway.passes.optimizer import OptimizerImplementation
from headway.passes.precision import Precision
from headway.passes.recompute import Recompute

BFLOAT16 = Precision(dtype="bfloat16")
OF_THE_SCRIPT = (OptimizerImplementation(implementation="fused"), InputWorkers(workers=1, prefetch=3))


def defined(*passes: Pass) -> dict[str, Any]:
    """What DDP's file defines."""
    names: dict[str, Any] = {}
    exec(ddp.settings(with_passes(*passes)).files[ddp.FILE], names)
    return names


@dataclasses.dataclass(frozen=True)
class Held:
    tensor: torch.Tensor
    count: int


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model(torch.linspace(-1, 1, 32).reshape(4, 8)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    "passes",
    [
        (Recompute(modules=("1", "2")),),
        (BFLOAT16,),
        (Precision(dtype="bfloat16", modules=("1",)),),
        (BFLOAT16, Recompute(modules=("1",))),
    ],
    ids=lambda passes: " and ".join(each.describe() for each in passes),
)
def test_what_is_prepared_computes_as_under_the_pass(passes: Sequence[Pass]) -> None:
    prepared, ours, plain = layers(), layers(), layers()
    defined(*passes)["prepare"](prepared)
    for one in passes:
        one.apply(ours, None)
    found, expected = gradients(prepared), gradients(ours)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    if any(isinstance(one, Precision) for one in passes):
        assert not torch.equal(found[0], gradients(plain)[0])
        assert prepared(torch.ones(1, 8)).dtype is torch.float32


def test_buffers_are_changed_once_by_what_recomputes() -> None:
    def normed() -> nn.Sequential:
        torch.manual_seed(3)
        spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        return nn.Sequential(nn.Linear(8, 8), nn.Sequential(spectral, nn.BatchNorm1d(8)), nn.Linear(8, 8))

    prepared, plain = normed(), normed()
    defined(Recompute(modules=("1",)))["prepare"](prepared)
    for _ in range(2):
        found, expected = gradients(prepared), gradients(plain)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    for one, other in zip(prepared.buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("one", [BFLOAT16, Recompute(modules=("1",))], ids=lambda one: one.describe())
def test_a_copy_computes_with_its_own_parameters(one: Pass) -> None:
    prepared = layers()
    defined(one)["prepare"](prepared)
    copied = copy.deepcopy(prepared)
    with torch.no_grad():
        for parameter in prepared.parameters():
            parameter.zero_()
    assert copied(torch.ones(1, 8)).abs().sum() > 0
    assert prepared(torch.ones(1, 8)).abs().sum() == 0


def test_what_recomputes_runs_twice_and_no_more() -> None:
    calls: list[int] = []
    prepared = layers()
    block = prepared[1]
    assert isinstance(block, nn.Sequential)
    block[0].register_forward_hook(lambda *_: calls.append(1))
    defined(Recompute(modules=("1",)))["prepare"](prepared)
    gradients(prepared)
    assert len(calls) == 2


@pytest.mark.filterwarnings(
    "ignore:.*script_method.* is deprecated:DeprecationWarning"
)  # of torch's compiler
def test_what_is_compiled_is_so_before_it_is_wrapped() -> None:
    prepared = layers()
    defined(Compile(modules=("1",)))["prepare"](prepared)
    assert prepared[1]._compiled_call_impl is not None
    assert prepared[2]._compiled_call_impl is None


def test_what_a_model_puts_out_in_containers_is_float32_too() -> None:
    low = torch.ones(2, dtype=torch.bfloat16)
    counts = torch.ones(2, dtype=torch.int64)
    given = {"loss": low, "others": [low, (low, counts)], "name": "x", "held": Held(low, 3)}
    found = defined(BFLOAT16)["in_float32"](given)
    assert given["loss"] is low
    assert found["held"].tensor.dtype is torch.float32
    assert found["held"].count == 3
    assert found["loss"].dtype is found["others"][0].dtype is found["others"][1][0].dtype is torch.float32
    assert found["others"][1][1].dtype is torch.int64
    assert found["name"] == "x"


def test_arguments_are_for_what_the_script_makes() -> None:
    names = defined(*OF_THE_SCRIPT)
    assert "prepare" not in names
    assert torch.optim.AdamW(layers().parameters(), **names["OPTIMIZER"]).defaults["fused"]
    loader = DataLoader(TensorDataset(torch.ones(4, 1)), **names["LOADER"])
    assert (loader.num_workers, loader.prefetch_factor) == (1, 3)
    use = ddp.settings(with_passes(*OF_THE_SCRIPT)).use
    assert "**OPTIMIZER" in use
    assert "**LOADER" in use


def test_names_of_modules_are_no_code() -> None:
    name = "a'''\"\"\"\nimport os"
    text = ddp.settings(with_passes(Recompute(modules=(name,)))).files[ddp.FILE]
    names: dict[str, Any] = {}
    exec(text, names)
    assert "os" not in names
    assert repr(name) in text


def test_what_a_script_has_to_do_itself_is_left_out_and_said() -> None:
    found = ddp.settings(with_passes(Accumulate(micro_batches=4), Precision(dtype="float16")))
    accumulated, scaled = found.lacks
    assert "4 parts of a batch in the script, with losses divided by 4" in accumulated
    assert "GradScaler" in scaled
    assert ddp.settings(with_passes(Recompute(modules=("1",)))).complete


def test_fsdp2_prepares_the_model_before_it_is_sharded() -> None:
    found = fsdp2.settings(with_passes(Recompute(modules=("layer1",)), *OF_THE_SCRIPT, name="decoupled"))
    text = found.files[fsdp2.FILE]
    assert not any("pass" in lack for lack in found.lacks)
    assert (
        text.index("def prepare(module):")
        < text.index("prepare(model)")
        < text.index("    fully_shard(group")
    )
    compile(text, "fsdp2_settings", "exec")


def test_deepspeed_has_words_for_some_and_a_file_for_the_others() -> None:
    passes = (BFLOAT16, Accumulate(micro_batches=4), Recompute(modules=("1",)), *OF_THE_SCRIPT)
    found = deepspeed.settings(with_passes(*passes))
    written = json.loads(found.files[deepspeed.FILE])
    assert written["gradient_accumulation_steps"] == 4
    assert written["torch_autocast"] == {
        "enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": [],
    }  # fmt: skip
    assert "divided by 4" in found.use
    assert "Call prepare(model)" in found.use
    names: dict[str, Any] = {}
    exec(found.files[deepspeed.PASSES_FILE], names)
    assert names["OPTIMIZER"] == {"fused": True}
    names["prepare"](layers())
    assert not any(lack.startswith("the pass") for lack in found.lacks)
    assert any(lack.startswith("float32 outputs") for lack in found.lacks)
    assert any(lack.startswith("splitting a batch") for lack in found.lacks)
    sent = deepspeed.settings(with_passes(BFLOAT16, wire=[{"dtype": "bfloat16"}]))
    assert "communication_data_type" not in json.loads(sent.files[deepspeed.FILE])
    assert any(lack.startswith("the wire format of buckets") for lack in sent.lacks)
    scaled = deepspeed.settings(with_passes(Precision(dtype="float16")))
    assert "torch_autocast" not in json.loads(scaled.files[deepspeed.FILE])
    assert any(lack.startswith("the pass precision in float16") for lack in scaled.lacks)
    alone = deepspeed.settings(with_passes(Precision(dtype="bfloat16", modules=("1",))))
    assert "torch_autocast" not in json.loads(alone.files[deepspeed.FILE])
    assert "lower_precision" in alone.files[deepspeed.PASSES_FILE]


def test_megatron_has_arguments_for_most() -> None:
    passes = (
        BFLOAT16, Accumulate(micro_batches=4), Recompute(modules=("a.0", "a.1")), InputWorkers(workers=3),
        Compile(modules=("1",)),
    )  # fmt: skip
    found = megatron.settings(with_passes(*passes))
    said = " ".join(found.arguments)
    assert "--recompute-granularity full --recompute-method block --recompute-num-layers 2" in said
    assert "--bf16" in found.arguments
    assert "--num-workers 3" in said
    assert "--global-batch-size to 16 times" in found.use
    assert [lack for lack in found.lacks if lack.startswith("the pass")] == ["the pass compile"]
    several = megatron.settings(
        with_passes(Precision(dtype="float16"), Recompute(modules=("a",)), Recompute(modules=("b", "c")))
    )
    assert several.arguments.count("--recompute-num-layers") == 1
    assert several.arguments[several.arguments.index("--recompute-num-layers") + 1] == "3"
    assert "--accumulate-allreduce-grads-in-fp32" in several.arguments


def test_collective_libraries_leave_passes_out() -> None:
    options = CollectiveOptions(channels=2, as_replayed=True)
    found = nccl.nccl(with_passes(BFLOAT16, collectives=options))
    assert "the pass precision" in found.lacks
    assert of_tables("".join(found.files.values()))
