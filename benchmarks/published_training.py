"""Published training rates against ``headway predict``: cases of ``published.py``.

Rates of one device judge the modelled times of layers, MLPerf's steps of one model at several batch sizes and numbers
of GPUs judge predictions that two of them have corrected.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from headway.cluster import Cluster, Host, NcclModel
from headway.models.bert import bert_base, bert_large
from headway.models.resnet import resnet50
from headway.models.roofline import DEVICES
from headway.models.table import LayerTable
from headway.prediction.calibration import MeasuredStep, calibrate
from headway.prediction.clusters import cluster_named
from headway.prediction.optimizers import OPTIMIZERS
from headway.prediction.replayed import Prediction, predict
from headway.prediction.workload import Workload, workload_of_table
from headway.strategies.ddp.policy import DistributedDataParallelStrategy

ROWS = Path(__file__).with_name("published_rows") / "training.csv"
DDP = DistributedDataParallelStrategy()
HDR_GBPS, NDR_GBPS = 188, 376


class Row(NamedTuple):
    """A published rate. ``samples`` is each worker's batch; shares of devices were taken from what ``is_fitted``."""

    source: str
    model: str
    device: str
    precision: str
    framework: str
    workers: int
    hosts: int
    samples: int
    samples_per_s: float
    is_fitted: bool

    @property
    def step(self) -> MeasuredStep:
        return MeasuredStep(
            self.workers, self.samples * self.workers / self.samples_per_s * 1e3, self.samples
        )

    @property
    def workload(self) -> Workload:
        table = MODELS[self.model](self.samples)
        return workload_of_table(table, DEVICES[self.device], OPTIMIZERS["momentum"], self.precision)


def _without_masked_words(table: LayerTable) -> LayerTable:
    """BERT as it is fine-tuned for answers."""
    layers = tuple(layer for layer in table.layers if not layer.name.startswith("cls."))
    return replace(table, layers=layers)


MODELS: Mapping[str, Callable[[int], LayerTable]] = {
    "resnet50": resnet50,
    "bert-large-128": lambda samples: bert_large(samples, 128),
    "bert-large-512": lambda samples: bert_large(samples, 512),
    "bert-large-squad": lambda samples: _without_masked_words(bert_large(samples, 384)),
    "bert-base-squad": lambda samples: _without_masked_words(bert_base(samples, 384)),
}


def _cards(cards: int, gbps: float, a_host: int, inside_gb_s: float, architecture: str = "ampere") -> Cluster:
    """Hosts of GPUs on NVLink with so many cards."""
    model = NcclModel.model_validate(
        {
            "architecture": architecture, "cpu": "amd", "inside_gb_s": inside_gb_s, "cards_gb_s": gbps / 8,
            "cards": cards,
        }
    )  # fmt: skip
    host = Host(name="host0", workers=a_host, up_gbps=cards * gbps, down_gbps=cards * gbps)
    return Cluster(hosts=(host,), latency_us=5, local_gbps=8 * inside_gb_s, library="nccl", nccl=model)


CLUSTERS: Mapping[str, Cluster] = {
    "Dell XE8545": _cards(2, HDR_GBPS, 4, 235),
    "Dell R750xa": cluster_named("edr-100g-pcie"),
    "NVIDIA DGX A100": _cards(8, HDR_GBPS, 8, 235),
    "NVIDIA DGX H100": _cards(8, NDR_GBPS, 8, 360, "hopper"),
    "HPE XL675d": _cards(4, HDR_GBPS, 8, 235),
}
DEVICE_CASES = tuple(
    f"training rate of one device, {precision}, {of}"
    for precision in ("fp32", "tf32", "fp16")
    for of in ("PyTorch", "other frameworks")
)
MLPERF_CASE = "MLPerf ResNet-50, two steps measured"
CASES = (*DEVICE_CASES, MLPERF_CASE)
WORDS = (
    "Training rates: images or sequences a second of ResNet-50 and BERT on one V100, A10, A100 or H100 "
    "(github.com/NVIDIA/DeepLearningExamples, github.com/lambdal/deeplearning-benchmark). Rows on V100 and A100 in "
    "PyTorch with tensor cores were fitted, all others are judged; of NVIDIA's PyTorch and PaddlePaddle rows, those of "
    "512 words are left out, as some are faster than the device's peak allows. MLPerf: steps of ResNet-50 by Dell, HPE "
    "and NVIDIA on 4 to 4,320 GPUs in MXNet (github.com/mlcommons, training_results v1.1 to v3.0: medians of the first "
    "five runs' epochs), most with a global batch of 3,264 shared out. Of each system two steps are given as "
    "--measured: that of the fewest GPUs, and that of the fewest with another batch a GPU; all others are judged. "
    "`within ±` is the share of rows that lie within the stated uncertainty. HPE's step on 32 GPUs takes twice as long "
    "as its step on 64 with half the batch, and Dell's on one host of R750xa does not tell of PCIe between two."
)  # fmt: skip


def training_row(case: str) -> dict[str, Any]:
    """One row of the page, for one of ``CASES``."""
    rows = _rows()
    if case == MLPERF_CASE:
        judged, fitted_on = mlperf(), "two steps of each system"
    else:
        judged = [
            (row, _alone(row))
            for row in rows
            if case == _device_case(row) and row.workers == 1 and not row.is_fitted
        ]
        fitted_on = "V100 and A100 in PyTorch" if "fp32" not in case else "RTX 2080 Ti in TensorFlow"
    off = sorted(abs(found.step_ms / row.step.ms - 1) for row, found in judged)
    signed = sorted(found.step_ms / row.step.ms - 1 for row, found in judged)
    inside = sum(abs(found.step_ms - row.step.ms) <= found.uncertainty_ms for row, found in judged)
    return {
        "case": case,
        "fitted on": fitted_on,
        "rows": len(judged),
        "median error": f"{_middle(off):.1%}",
        "p90": f"{off[int(0.9 * (len(off) - 1))]:.1%}",
        "bias": f"{_middle(signed):+.1%}",
        "within ±": f"{inside / len(judged):.0%}",
    }


def _middle(values: list[float]) -> float:
    return (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2


def _rows() -> list[Row]:
    found = []
    for row in csv.DictReader(ROWS.read_text().splitlines()):
        workers, hosts, samples = (int(row[name]) for name in ("workers", "hosts", "samples"))
        source, model, device, precision, framework = (
            row[name] for name in ("source", "model", "device", "precision", "framework")
        )
        rate, is_fitted = float(row["samples_per_s"]), row["fitted"] == "yes"
        found.append(
            Row(source, model, device, precision, framework, workers, hosts, samples, rate, is_fitted)
        )
    return found


def _device_case(row: Row) -> str:
    of = row.framework if row.framework == "PyTorch" else "other frameworks"
    return f"training rate of one device, {row.precision}, {of}"


def _alone(row: Row) -> Prediction:
    return predict(row.workload, CLUSTERS["NVIDIA DGX A100"].resized(1), "ddp", DDP)


def mlperf() -> list[tuple[Row, Prediction]]:
    """The steps of every system but two that count as measured, as predicted from these."""
    rows = [row for row in _rows() if row.workers > 1]
    return [
        each
        for name in dict.fromkeys(row.source for row in rows)
        for each in _of_system([row for row in rows if row.source == name])
    ]


def _of_system(rows: list[Row]) -> list[tuple[Row, Prediction]]:
    rows.sort(key=lambda row: row.workers)
    known = (rows[0], next(row for row in rows if row.samples != rows[0].samples))
    (cluster,) = (each for name, each in CLUSTERS.items() if name in rows[0].source)
    found = calibrate({row.step: row.workload for row in known}, cluster, "ddp", DDP)
    return [
        (row, predict(found.corrected(row.workload), cluster.resized(row.workers), "ddp", DDP, found.what_if))
        for row in rows
        if row not in known
    ]
