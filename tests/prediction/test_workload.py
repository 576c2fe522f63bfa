from __future__ import annotations

import pytest

from headway.errors import UserError
from headway.graph.computation import Part, Point
from headway.graph.step_layout import LayerTimes
from headway.model import ModelSpec, ParameterSpec
from headway.models.catalogue import MODELS
from headway.models.convolutional import resnet50
from headway.models.roofline import DEVICES
from headway.models.table import LayerTable
from headway.models.transformer import bert_large
from headway.prediction.optimizers import OPTIMIZERS
from headway.prediction.workload import Workload, workload_of_table


def tied_workload() -> Workload:
    """Two layers of which the second uses the first one's parameter as well."""
    parameters = tuple(
        ParameterSpec(name=name, shape=(10,), dtype="float32", module=name[0]) for name in ("a.w", "b.w")
    )
    layers = (LayerTimes("a", ("a.w",), 10, 20), LayerTimes("b", ("b.w", "a.w"), 30, 60))
    return Workload("tied", "1 sample", 1, "invented", ModelSpec(parameters=parameters), layers, 7)


def test_a_gradient_is_ready_when_backward_is_done_with_all_that_use_it() -> None:
    items = tied_workload().timeline(rank=3, step=2).items
    ready = [item.name for item in items if item.kind == Point.READY]
    assert ready == ["b.w", "a.w"]
    assert [item.name for item in items if item.kind == Point.USE] == ["a", "b"]
    assert sum(item.duration_ns for item in items) == tied_workload().computation_ns == 127
    assert [item.kind for item in items[-3:]] == [Point.BACKWARD_END, Point.STEP, Part.OPTIMIZER]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("device", ["rtx-2080-ti", "b200"])
def test_every_table_on_every_device_readies_every_gradient_once(name: str, device: str) -> None:
    workload = workload_of_table(MODELS[name](), DEVICES[device], OPTIMIZERS["adam"])
    ready = [item.name for item in workload.timeline().items if item.kind == Point.READY]
    assert sorted(ready) == sorted(workload.spec.by_name)
    assert workload.spec.optimizer_state_bytes == 2 * workload.spec.size_bytes
    assert workload.computation_ns > 1_000_000


@pytest.mark.parametrize(("name", "count"), [("vgg16", 138_357_544), ("gpt2", 124_439_808)])
def test_models_have_as_many_parameters_as_published(name: str, count: int) -> None:
    assert MODELS[name]().parameter_count == count


@pytest.mark.parametrize("name", MODELS)
def test_what_an_optimizer_holds_counts_for_tables_as_for_functions(name: str) -> None:
    for optimizer, states, temporaries in (("sgd", 0, 0), ("momentum", 1, 0), ("adam", 2, 1)):
        spec = workload_of_table(MODELS[name](), DEVICES["a100"], OPTIMIZERS[optimizer]).spec
        assert spec.optimizer_state_bytes == states * spec.size_bytes
        assert spec.pass_memory is not None
        assert spec.pass_memory.update_bytes == temporaries * spec.size_bytes


def test_mixed_precision_keeps_gradients_and_halves_activations() -> None:
    single, mixed = (
        workload_of_table(MODELS["resnet50"](samples=256), DEVICES["h100"], OPTIMIZERS["momentum"], precision)
        for precision in ("fp32", "bf16")
    )
    assert mixed.spec.size_bytes == single.spec.size_bytes
    assert mixed.spec.optimizer_state_bytes == single.spec.optimizer_state_bytes
    assert mixed.optimizer_ns == single.optimizer_ns
    assert mixed.spec.pass_memory is not None
    assert single.spec.pass_memory is not None
    held, copies = mixed.spec.pass_memory.forward_bytes, single.spec.size_bytes // 2
    assert held == pytest.approx(single.spec.pass_memory.forward_bytes / 2 + copies, rel=0.03)
    assert single.computation_ns / mixed.computation_ns > 2
    assert "in bf16" in mixed.times


# Samples a second on one device in PyTorch: NVIDIA/DeepLearningExamples, lambdal/deeplearning-benchmark.
@pytest.mark.parametrize(
    ("model", "device", "precision", "per_s"),
    [
        (resnet50(256), "a100-80gb", "fp16", 2470), (resnet50(256), "a100-80gb", "tf32", 938),
        (resnet50(256), "v100", "fp16", 1200), (bert_large(256, 128), "a100-80gb", "fp16", 580),
        (bert_large(128, 128), "a100-80gb", "tf32", 317), (bert_large(64, 128), "v100", "fp16", 224),
        (resnet50(640), "h100", "tf32", 1753), (resnet50(448), "a10", "fp16", 638),
    ],
)  # fmt: skip
def test_tensor_cores_reach_what_is_published(
    model: LayerTable, device: str, precision: str, per_s: float
) -> None:
    workload = workload_of_table(model, DEVICES[device], OPTIMIZERS["momentum"], precision)
    predicted_ms, published_ms = workload.computation_ns / 1e6, workload.samples / per_s * 1e3
    assert abs(published_ms - predicted_ms) < workload.times_error * predicted_ms


def test_a_device_without_a_precision_says_so() -> None:
    with pytest.raises(UserError, match="V100 SXM2 does not support this precision"):
        DEVICES["v100"].at("bf16")
