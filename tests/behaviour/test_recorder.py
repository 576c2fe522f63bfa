"""The recorder with other things that scripts do: copies, saves, other optimizers and groups, folders that vanish."""

from __future__ import annotations

import copy
import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests import workers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import headway
from headway.errors import HeadwayError, LaunchError, TraceError
from headway.replayer.replayer import Replayer
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.decoupled.wrapper import DecoupledDataParallel
from headway.trace.events import Kind

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

HERE = "tests.behaviour.test_recorder"
CAPS_MB = [
    16 * 4 / 2**20,
    1.0,
]  # the last bias (16 bytes) does not reach the first of both, with its weight it does


def build(**options: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4))
    model = DistributedDataParallel(net, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int = 1) -> None:
    optimizer.zero_grad()
    for number in range(micro_batches):
        last = number == micro_batches - 1
        context = torch.enable_grad() if last else model.no_sync()  # type: ignore[operator]
        with context:
            model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()


def awkward_scripts(_rank: int, _world_size: int, folder: str) -> dict[str, object]:
    """One rank's part of several recordings; returns what the tests look at."""
    seen: dict[str, object] = {}
    calibrated = nn.Linear(2, 2)
    throw_away = torch.optim.SGD(calibrated.parameters(), lr=0.1)
    original = dist.destroy_process_group
    with headway.record(Path(folder, "first"), first_step=2, stop_step=5):
        calibrated(torch.ones(1, 2)).sum().backward()
        throw_away.step()
        temporary = dist.new_group([0, 1])
        dist.barrier(temporary)  # the other rank may still be connecting to this one
        dist.destroy_process_group(temporary)
        model, optimizer = build()
        averaged = copy.deepcopy(model.module)
        for _ in range(6):
            step(model, optimizer, micro_batches=3)
            torch.save(model.module, io.BytesIO())
            with torch.no_grad():
                averaged(torch.ones(4, 8))
    seen["undone"] = dist.destroy_process_group is original
    seen["hooks"] = len(model._forward_hooks) + sum(len(m._forward_hooks) for m in model.module.modules())

    with headway.record(Path(folder, "second"), model, first_step=1, stop_step=3):
        for _ in range(4):
            step(model, optimizer)

    model_of_caps, its_optimizer = build(bucket_cap_mb_list=CAPS_MB)
    with headway.record(Path(folder, "caps"), model_of_caps, first_step=2, stop_step=4):
        for _ in range(5):
            step(model_of_caps, its_optimizer)

    decoupled = DecoupledDataParallel(nn.Linear(8, 4))
    adafactor = torch.optim.Adafactor(decoupled.parameters())
    with headway.record(Path(folder, "third"), decoupled, first_step=2, stop_step=4):
        for _ in range(5):
            step(decoupled, adafactor)
    try:
        with headway.record(Path(folder, "first"), model):
            pass
    except TraceError:
        seen["refused"] = True
    try:
        with headway.record(Path(folder, "short"), model):
            pass
    except LaunchError as error:
        seen["short"] = str(error)
    try:
        with headway.record(Path(folder, "vanished"), model, first_step=1, stop_step=3):
            dist.barrier()
            shutil.rmtree(Path(folder, ".vanished.recording"), ignore_errors=True)
            for _ in range(4):
                step(model, optimizer)
            seen["went on"] = True
    except (HeadwayError, OSError):
        pass
    dist.barrier()
    return seen


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, object]]]:
    folder = tmp_path_factory.mktemp("recorder")
    return folder, workers.run(2, f"{HERE}:awkward_scripts", str(folder))


def test_accumulation_a_throw_away_optimizer_and_a_small_group_do_not_confuse_it(
    done: tuple[Path, list[dict[str, object]]],
) -> None:
    trace = headway.load_trace(done[0] / "first")
    assert len(trace.steps) >= 2
    for current in trace.steps:
        rows = list(trace.events[0].of_step(current))
        assert sum(row.kind == Kind.BACKWARD_PASS for row in rows) == 3
        assert sum(row.kind == Kind.COLLECTIVE and row.bucket >= 0 for row in rows) == 1
    # One forward's outputs of batch 4: 16, 16 (in place, counted as the module's output) and 4 floats each.
    assert trace.model.activation_bytes == 4 * 4 * (16 + 16 + 4)


def test_a_pass_before_the_recorded_steps_is_watched(
    done: tuple[Path, list[dict[str, object]]],
) -> None:
    for name, accumulates in (("first", True), ("second", False)):
        memory = headway.load_trace(done[0] / name).model.pass_memory
        assert memory is not None
        # The batch, what the first layer puts out and is activated in place, and what the second one puts out.
        assert memory.forward_bytes == 4 * 4 * (8 + 16 + 4)
        assert [parameter for parameter, _ in memory.backward] == ["2.bias", "2.weight", "0.bias", "0.weight"]
        assert memory.gradients_accumulate == accumulates
        assert memory.gradients_apart
    assert headway.load_trace(done[0] / "third").model.pass_memory is None, "it is not stock DDP"


def test_everything_is_undone_afterwards(done: tuple[Path, list[dict[str, object]]]) -> None:
    for seen in done[1]:
        assert seen["undone"]
        assert seen["hooks"] == 0


def test_a_form_that_the_optimizer_changed_is_recorded_as_it_ran(
    done: tuple[Path, list[dict[str, object]]],
) -> None:
    recorded = headway.load_trace(done[0] / "third").manifest.ranks[0].strategy["decoupled"]
    assert DecoupledStrategy.model_validate(recorded).gather == "gradients"


def test_caps_for_each_bucket_are_recorded_and_replayed(
    done: tuple[Path, list[dict[str, object]]],
) -> None:
    replayer = Replayer(headway.load_trace(done[0] / "caps"))
    assert replayer.recorded_strategy == DistributedDataParallelStrategy(bucket_caps_mb=tuple(CAPS_MB))
    buckets = replayer.base.graph.schedule.buckets
    assert [bucket.parameters for bucket in buckets] == [("2.bias", "2.weight"), ("0.bias", "0.weight")]


def test_a_second_recording_of_one_process_is_whole(done: tuple[Path, list[dict[str, object]]]) -> None:
    trace = headway.load_trace(done[0] / "second")
    assert trace.steps == (1, 2)
    assert trace.manifest.ranks[1].clock.uncertainty_ns < 1e9


def test_what_cannot_be_recorded_is_refused_on_every_rank_and_leaves_nothing(
    done: tuple[Path, list[dict[str, object]]],
) -> None:
    folder, ranks = done
    assert all(seen["refused"] and seen["went on"] for seen in ranks)
    assert "0 optimizer steps" in str(ranks[0]["short"])
    assert sorted(path.name for path in folder.iterdir()) == ["caps", "first", "second", "third"]
