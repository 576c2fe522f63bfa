from __future__ import annotations

from pathlib import Path

import pytest

from headway.cluster import Cluster
from headway.errors import ClusterError, UserError
from headway.models.table import at_batch
from headway.prediction.clusters import cluster_named, shipped
from headway.prediction.models import workload_named

GOOD = """
name: mine
samples: 16
layers:
- {name: a, parameters: {weight: [10, 20], bias: [10]}, forward_ms: 1.5, backward_ms: 4}
- {name: b, parameters: {weight: [5]}, forward_ms: 1, tied: [a.weight]}
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    return path


def test_a_table_with_times_is_taken_as_it_stands(table: Path) -> None:
    workload = workload_named(str(table), None, "sgd")
    assert [(layer.forward_ns, layer.backward_ns) for layer in workload.layers] == [
        (1_500_000, 4_000_000), (1_000_000, 2_000_000),
    ]  # fmt: skip
    assert workload.spec.size_bytes == 4 * 215
    assert workload.layers[1].parameters == ("b.weight", "a.weight")
    assert workload.times == "as in mine.yaml"


def test_a_table_with_work_needs_a_device(table: Path) -> None:
    table.write_text(GOOD.replace("forward_ms: 1,", "flops: 1.0e+12,"))
    with pytest.raises(UserError, match="--device"):
        workload_named(str(table), None, "sgd")
    workload = workload_named(str(table), "v100", "sgd")
    assert workload.layers[1].forward_ns == pytest.approx(1e12 / (0.8 * 15.7e12) * 1e9, rel=0.01)


def test_times_at_two_batch_sizes_have_a_fixed_part(table: Path) -> None:
    table.write_text(GOOD.replace("1.5, backward_ms: 4", "{16: 1.5, 32: 2.5}, backward_ms: {16: 4, 32: 7}"))
    workload = workload_named(str(table), None, "sgd", 48)
    assert workload.samples == 48
    assert (workload.layers[0].forward_ns, workload.layers[0].backward_ns) == (3_500_000, 10_000_000)
    assert workload.layers[1].forward_ns == 3_000_000
    assert "proportional to the batch" in workload.notes[0]
    assert workload_named(str(table), None, "sgd").layers[0].forward_ns == 1_500_000


def test_work_grows_with_the_batch_and_parameters_and_kernels_do_not(table: Path) -> None:
    table.write_text(GOOD.replace("forward_ms: 1,", "flops: 1.0e+9, moved_bytes: 1020, kernels: 7,"))
    few, many = (
        workload_named(str(table), "v100", "sgd", samples).layers[1].forward_ns for samples in (16, 64)
    )
    fixed_ns = 7 * 5000 + 20 / (0.85 * 900)
    assert many - fixed_ns == pytest.approx(4 * (few - fixed_ns), abs=5)
    table.write_text(GOOD.replace("forward_ms: 1,", "flops: {8: 1.0e+9, 16: 3.0e+9},"))
    assert workload_named(str(table), "v100", "sgd").layers[1].forward_ns == pytest.approx(
        3e9 / 12.56e12 * 1e9 + 5000, abs=1
    )


def test_parameters_in_half_precision_have_gradients_in_it(table: Path) -> None:
    table.write_text(
        GOOD.replace("samples: 16", "samples: 16\ndtype: bfloat16").replace("forward_ms: 1,", "flops: 1,")
    )
    workload = workload_named(str(table), "a100", "sgd")
    assert workload.spec.size_bytes == 2 * 215
    assert workload.times.endswith(" in bf16")
    with pytest.raises(UserError, match="does not match the type of the model"):
        workload_named(str(table), "a100", "sgd", None, "fp32")


@pytest.mark.parametrize(
    ("values", "samples", "expected"),
    [
        ({32: 0.8, 64: 1.4}, 96, 2.0), ({32: 0.8, 64: 1.4}, 32, 0.8), ({10: 1.0, 20: 3.0}, 5, 0.5),
        ({10: 1.0, 20: 3.0}, 30, 5.0), ({10: 2.0, 20: 1.0}, 100, 1.0), ({10: 2.0, 20: 1.0}, 5, 2.5),
    ],
)  # fmt: skip
def test_a_line_through_two_batch_sizes(values: dict[int, float], samples: int, expected: float) -> None:
    assert at_batch(values, samples) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("find", "put"),
    [
        ("1.5,", "{16: 1.5},"), ("1.5,", "{16: 1.5, 32: 2},"), ("1.5,", "{0: 1.5, 32: 2},"),
        ("samples: 16", "samples: 0"), ("name: b", "name: a"), ("a.weight", "c.weight"), ("forward_ms: 1,", ""),
        ("forward_ms: 1,", "forward_ms: .nan,"), ("[10, 20]", "[-1]"), ("[10, 20]", "[99999999999, 99999999999]"),
        ("forward_ms: 1,", "forward_ms: 1, colour: red,"), ("layers:", "layers: []\nothers:"), ("name: mine", "]"),
    ],
)  # fmt: skip
def test_tables_that_are_wrong_are_refused_on_one_line(table: Path, find: str, put: str) -> None:
    table.write_text(GOOD.replace(find, put))
    with pytest.raises(UserError) as caught:
        workload_named(str(table), None, "sgd")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", shipped())
def test_every_cluster_that_ships_says_where_its_numbers_are_from(name: str) -> None:
    cluster = cluster_named(name)
    assert len(cluster.source) > 80
    assert cluster.world_size > 1


def test_clusters_are_files_too(tmp_path: Path) -> None:
    cluster_named(shipped()[0]).save(tmp_path / "c.yaml")
    assert cluster_named(str(tmp_path / "c.yaml")) == Cluster.load(tmp_path / "c.yaml")
    with pytest.raises(ClusterError, match=shipped()[0]):
        cluster_named("nowhere")
