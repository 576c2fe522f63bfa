"""Compressed gradients, live: the numbers of one process, states that are saved, and what is not finite."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import workers
from tests.behaviour.compression_cases import STEPS, alone, net
from torch import nn

import headway
from headway.cluster import CodecCost
from headway.compression.cast import Cast
from headway.compression.int8 import Int8
from headway.compression.registry import codecs, proposed
from headway.errors import UnsupportedError, UserError
from headway.replayer.replayer import Replayer
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.ddp.runtime import check_wire
from headway.trace.folder import load_trace

CASES = "tests.behaviour.compression_cases"
SENT_AS: list[dict[str, Any]] = [
    {"codec": "cast", "dtype": "bfloat16"},
    {"codec": "cast", "dtype": "float16", "error_feedback": True},
    {"codec": "int8", "block": 64},
    {"codec": "top-k", "share": 0.05},
    {"codec": "power-sgd", "rank": 2},
]
SHAPES = [
    (None, 1, False),
    (0.002, 2, False),
    (0.002, 1, True),
]  # cap in MiB, accumulated passes, some unused

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("world_size", [2, 4])
def test_same_numbers_as_one_process_step_by_step(world_size: int) -> None:
    cases = [(options, *shape) for options in SENT_AS for shape in SHAPES]
    results = workers.run(world_size, f"{CASES}:trained", cases, timeout_s=110)
    rebuilt = 0
    for number, (options, _, accumulate, some_unused) in enumerate(cases):
        own = results[0][number]
        assert all(result[number] == own for result in results), "ranks parted"
        codec = codecs()[options["codec"]].model_validate(options)
        expected = alone(codec, own["log"], world_size, accumulate, some_unused=some_unused)
        # Four ranks' halves are added up in another order than here.
        off = 1e-9 if options["codec"] != "cast" or world_size == 2 else 1e-2
        for got, wanted in zip(own["values"], expected, strict=True):
            assert got == pytest.approx(wanted, rel=off, abs=off), options
        rebuilt += own["log"][0] != own["log"][-1]
    assert rebuilt, "DDP has cut its buckets anew, and what was kept went along"


@pytest.mark.parametrize("options", SENT_AS[3:], ids=lambda options: str(options["codec"]))
def test_training_goes_on_from_a_saved_state(options: dict[str, Any]) -> None:
    for found in workers.run(2, f"{CASES}:resumed", options):
        same = [a for each in found["with its state"] for a in each]
        assert same == pytest.approx(
            [a for each in found["without a break"] for a in each], rel=1e-9, abs=1e-12
        )
        assert found["without"] != found["without a break"]
        assert "a job of 7 ranks" in found["foreign"]
        assert "nobody" in found["nobody"]
        assert "first.bias" in found["short"]
        assert "frozen, which the model does not train" in found["frozen"]
        assert "power-sgd" not in str(options) or "different" in found["parted"]


@pytest.mark.parametrize("options", SENT_AS, ids=lambda options: str(options["codec"]))
def test_a_step_that_is_not_finite_leaves_nothing_behind(options: dict[str, Any]) -> None:
    results = workers.run(3, f"{CASES}:scaled", options)
    assert all(result == results[0] for result in results)
    assert results[0]["finite"] == [True, False, True]


@pytest.mark.parametrize(
    "wire",
    [*([each] for each in SENT_AS), [{"codec": "top-k", "share": 0.1}, None]],
    ids=lambda wire: " ".join(str(each and each["codec"]) for each in wire),
)
def test_a_step_that_is_left_out_leaves_nothing_in_any_bucket(wire: list[dict[str, Any] | None]) -> None:
    """Also of those that were finite: what they kept is in units of a scale that is no more."""
    for with_it, without in workers.run(2, f"{CASES}:scaled_in_part", wire):
        assert with_it == without


def test_buckets_are_sent_each_as_the_plan_says() -> None:
    for found in workers.run(2, f"{CASES}:mixed"):
        *compressed, as_it_is = found["nonzero"]
        assert as_it_is == 12, "the bias of the last layer, whose gradient is ready first"
        for sent, numel in zip(compressed, (600, 30, 900, 30, 360), strict=True):
            assert 0 < sent <= 2 * math.ceil(0.02 * numel)
        assert found["halves"] == pytest.approx(3.0, rel=0.02)


def test_losses_of_digits_end_where_uncompressed_ones_do() -> None:
    """Several seeds; with the learning rate of the uncompressed job."""
    lossy = {"codec": "top-k", "share": 0.01}
    methods: dict[str, list[dict[str, Any]]] = {
        "as they are": [],
        "bfloat16": [{"codec": "cast", "dtype": "bfloat16"}],
        "float16": [{"codec": "cast", "dtype": "float16"}],
        "int8": [{"codec": "int8"}],
        "top-k": [lossy],
        "top-k, nothing kept": [lossy | {"error_feedback": False}],
        "PowerSGD": [{"codec": "power-sgd", "rank": 2}],
    }
    pytest.importorskip("sklearn")
    found = workers.run(2, f"{CASES}:converged", methods, [0, 1, 2], 400, timeout_s=150)[0]
    mean = {name: sum(losses) / len(losses) for name, losses in found.items()}
    print(found)
    target = 0.08
    assert mean["as they are"] < target
    for name in ("bfloat16", "float16", "int8", "top-k", "PowerSGD"):
        assert mean[name] < 1.5 * target, (name, found)
    for name in ("bfloat16", "float16", "int8"):
        assert mean[name] == pytest.approx(mean["as they are"], rel=0.1), (name, found)
    assert mean["top-k, nothing kept"] > 1.5 * mean["top-k"], found


def test_the_decoupled_all_reduce_casts_gradients_and_no_parameters() -> None:
    results = workers.run(2, f"{CASES}:decoupled", ["parameters", "gradients"])
    codec = Cast(dtype="bfloat16")
    names = [name for name, _ in net(some_unused=False).named_parameters()]
    expected = alone(codec, [[names]] * STEPS, 2, 1, some_unused=False)
    for result in results:
        for found in result:
            assert found["wire"] == codec.model_dump(mode="json")
            for got, wanted in zip(found["values"], expected, strict=True):
                assert got == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("options", [SENT_AS[2], SENT_AS[4]], ids=lambda options: str(options["codec"]))
def test_an_unmodified_script_compresses_and_its_recording_replays(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    found = workers.run(3, f"{CASES}:recorded", str(tmp_path), options)
    assert all(each["compresses"] for each in found)
    trace = load_trace(tmp_path / "trace")
    of_buckets = trace.events[0].where(trace.events[0].algorithm == "compressed")
    kinds = {"int8": {"all_to_all", "all_gather"}, "power-sgd": {"all_reduce"}}[options["codec"]]
    assert set(of_buckets.name.tolist()) == kinds
    replayer = Replayer(trace)
    strategy = replayer.recorded_strategy
    assert strategy.model_dump(mode="json")["wire"] == [
        codecs()[options["codec"]].model_validate(options).model_dump()
    ]
    result = replayer.replay()
    laid_out = {(c.bucket, c.name, c.size_bytes) for c in result.graph.collectives if c.bucket >= 0}
    rows = zip(
        of_buckets.bucket.tolist(), of_buckets.name.tolist(), of_buckets.size_bytes.tolist(), strict=True
    )
    assert set(rows) == laid_out, "what was sent is what was decided"
    assert replayer.replay(DistributedDataParallelStrategy()).step_ms > 0


@pytest.mark.parametrize("busy_cores", [True, False])
def test_costs_of_codecs_are_measured(busy_cores: bool) -> None:
    first, second = workers.run(2, f"{CASES}:costs", busy_cores)
    assert first == second
    assert set(first) == {codec.cost_name for codec in proposed()}
    for codec in proposed():
        cost = CodecCost.model_validate(first[codec.cost_name])
        assert len(cost.bucket_us) == len(codec.default_us(1, 2))
        assert all(us + mib_us > 0 for us, mib_us in zip(cost.bucket_us, cost.mib_us, strict=True))
        assert busy_cores or cost.slowdown == 0


def test_what_could_not_be_sent_is_refused() -> None:
    int8 = DistributedDataParallelStrategy(wire=(Int8(),))
    for module, said in (
        (nn.Linear(2, 2, dtype=torch.complex64), "floating-point"),
        (nn.Embedding(4, 2, sparse=True), "sparse"),
        (nn.Linear(2, 2, device="meta"), "on the CPU"),
    ):
        with pytest.raises(UnsupportedError, match=said):
            check_wire(module, int8)
    check_wire(
        nn.Linear(2, 2, device="meta"), DistributedDataParallelStrategy(wire=(Cast(dtype="bfloat16"),))
    )
    with pytest.raises(UserError, match="as they are"):
        headway.compression_state(nn.Linear(2, 2))


def test_a_codec_of_another_package_that_parts_ranks_is_found_in_the_first_step() -> None:
    results = workers.run(2, f"{CASES}:compared", timeout_s=60)
    for rank, (alike, apart) in enumerate(results):
        assert alike == ""
        assert (
            f"rank {rank}: the codec apart of {CASES} cannot be used: the means of one bucket differ" in apart
        )
