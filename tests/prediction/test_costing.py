from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headway.errors import UserError
from headway.prediction.costing import LayerWork
from headway.prediction.function import Built, function_named
from headway.prediction.models import workload_named, workloads_named
from headway.prediction.timing import timed_layers


class Net(nn.Module):
    """Two dense layers and a convolution, the last layer tied to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 128)
        self.relu = nn.ReLU()
        self.second = nn.Linear(128, 64)
        self.last = nn.Linear(64, 128, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.second(self.relu(self.first(x))))
        return out


def make() -> tuple[nn.Module, torch.Tensor]:
    return Net(), torch.zeros(32, 64)


META = torch.device("meta")


def test_the_work_of_dense_layers_is_that_of_their_products() -> None:
    costed = LayerWork(Built("net", make, META))
    assert list(costed.work) == ["first", "second", "last"]
    assert costed.work["first"].flops == costed.work["second"].flops == 2 * 32 * 64 * 128
    assert costed.work["first"].kernels == 2  # the activation that follows is counted with it
    assert costed.built.samples == 32
    assert costed.built.batch == "32x64"


def test_a_shared_parameter_has_one_name() -> None:
    built = Built("net", make, META)
    assert built.layers["last"] == ("first.weight",)
    assert built.layers["first"] == ("first.weight", "first.bias")


def test_a_module_is_timed_layer_by_layer() -> None:
    layers, error = timed_layers(Built("net", make, torch.device("cpu")))
    assert 0 < error < 10
    assert [layer.module for layer in layers] == ["first", "second", "last"]
    assert all(layer.forward_ns > 0 for layer in layers)
    assert all(layer.backward_ns > 0 for layer in layers[:2])


def test_a_function_becomes_a_workload(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "my_nets.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def small():\n    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.zeros(5, 8)\n"
        "def nothing():\n    return 7\n"
        "def values():\n    class V(nn.Linear):\n        def forward(self, x):\n"
        "            return super().forward(x) if float(x.sum()) >= 0 else x\n    return V(2, 2), torch.zeros(3, 2)\n"
        "def frozen():\n    return nn.Linear(2, 2).requires_grad_(False), torch.zeros(3, 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    for device in ("a100", "here"):
        workload = workload_named("my_nets:small", device, "adam")
        assert workload.samples == 5
        assert workload.spec.ready_order[-1] == "0.weight"
        assert workload.spec.forward_order == ("0", "2")
        assert workload.spec.pass_memory is not None
        assert workload.spec.pass_memory.forward_bytes >= 5 * (8 + 16 + 4) * 4
    for name in ("nothing", "values", "frozen", "missing"):
        with pytest.raises(UserError) as caught:
            workload_named(f"my_nets:{name}", None, "adam")
        assert "\n" not in str(caught.value)
    assert workload_named("my_nets:values", "here", "adam").samples == 3, "timed where it cannot be costed"
    with pytest.raises(UserError, match="cannot be imported"):
        function_named("no_such_module_here:f")


FUNCTIONS = """
import torch
from torch import nn

def net():
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 16))
    return model, torch.zeros(8, 256)

def sized(samples=8):
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 16)), torch.zeros(samples, 256)

def stubborn(samples=8):
    return nn.Linear(2, 2), torch.zeros(8, 2)

def halves():
    return nn.Linear(64, 2, dtype=torch.bfloat16), torch.zeros(8, 64, dtype=torch.bfloat16)
"""


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> str:
    name = f"sized_nets_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    return name


def test_functions_are_costed_at_any_batch(functions: str) -> None:
    batches = [2, 16, 64]
    resized = workloads_named(f"{functions}:net", None, "sgd", batches)
    called = workloads_named(f"{functions}:sized", None, "sgd", batches)
    alone = workload_named(f"{functions}:net", None, "sgd", 16)
    for workload in (resized[16], called[16]):
        assert workload.samples == 16
        assert workload.computation_ns == pytest.approx(alone.computation_ns, rel=0.001)
        assert workload.spec.pass_memory is not None
        assert alone.spec.pass_memory is not None
        assert workload.spec.pass_memory.forward_bytes == alone.spec.pass_memory.forward_bytes
    assert [resized[samples].samples for samples in batches] == batches
    with pytest.raises(UserError, match="ignored its argument samples"):
        workload_named(f"{functions}:stubborn", None, "sgd", 4)


def test_functions_are_timed_at_two_batch_sizes(functions: str) -> None:
    found = workloads_named(f"{functions}:net", "here", "sgd", [1, 64, 4096])
    assert [found[samples].samples for samples in (1, 64, 4096)] == [1, 64, 4096]
    assert found[4096].spec.pass_memory is not None
    assert found[4096].spec.pass_memory.forward_bytes > 4096 * 512 * 4


def test_mixed_precision_of_functions(functions: str) -> None:
    single, mixed = (
        workload_named(f"{functions}:net", "a100", "sgd", 4096, each) for each in ("fp32", "bf16")
    )
    assert mixed.spec.size_bytes == single.spec.size_bytes
    assert mixed.computation_ns < single.computation_ns
    assert mixed.spec.pass_memory is not None
    assert single.spec.pass_memory is not None
    assert mixed.spec.pass_memory.forward_bytes < 0.8 * single.spec.pass_memory.forward_bytes
    stored = workload_named(f"{functions}:halves", "a100", "sgd")
    assert stored.spec.size_bytes == 2 * 130
    assert stored.times.endswith(" in bf16")
    with pytest.raises(UserError, match="does not match the type of the model"):
        workload_named(f"{functions}:halves", "a100", "sgd", None, "fp16")
    assert workload_named(f"{functions}:net", "here", "sgd", None, "bf16").computation_ns > 0
