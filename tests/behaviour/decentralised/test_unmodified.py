"""Scripts written for DistributedDataParallel, under ``headway run`` with a plan of partial all-reduce."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import commands
from tests.scripts import train_digits
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from headway.plan import Plan
from headway.strategies.live.module_spec import model_spec
from headway.strategies.partial_all_reduce.policy import PartialAllReduceStrategy

pytestmark = [pytest.mark.processes, pytest.mark.timeout(250)]
WORKERS = 4


def plan(folder: Path, workers: int = WORKERS, **options: Any) -> Path:
    strategy = PartialAllReduceStrategy(**options)
    path = folder / "plan.yaml"
    Plan.data_parallel(strategy, workers, model_spec(train_digits.Net())).save(path)
    return path


def reference(
    epochs: int, accumulation: int, clip: float, ranks_a_worker: int = 1
) -> dict[str, torch.Tensor]:
    """The same training in one process: each worker steps on its ranks' batches, and then all take the mean."""
    dataset, _ = train_digits.data()
    models: list[train_digits.Net] = []
    optimizers: list[torch.optim.Optimizer] = []
    for _ in range(WORKERS // ranks_a_worker):
        torch.manual_seed(0)  # all begin with rank 0's
        models.append(train_digits.Net())
        optimizers.append(torch.optim.SGD(models[-1].parameters(), lr=0.1, momentum=0.9))
    samplers: list[DistributedSampler[tuple[torch.Tensor, ...]]] = [
        DistributedSampler(dataset, WORKERS, rank) for rank in range(WORKERS)
    ]
    for epoch in range(epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        loaders = [DataLoader(dataset, batch_size=25, sampler=sampler) for sampler in samplers]
        for step, batches in enumerate(zip(*loaders, strict=True), 1):
            for rank, (images, labels) in enumerate(batches):
                loss = nn.functional.cross_entropy(models[rank // ranks_a_worker](images), labels)
                (loss / accumulation / ranks_a_worker).backward()
            if step % accumulation == 0:
                _step_and_average(models, optimizers, clip)
    return models[0].state_dict()


def _step_and_average(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], clip: float
) -> None:
    for model, optimizer in zip(models, optimizers, strict=True):
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for same in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack(list(same)).mean(0)
            for parameter in same:
                parameter.copy_(mean)


@pytest.mark.parametrize(
    ("arguments", "accumulation", "clip"),
    [
        pytest.param((), 1, 0.0, marks=pytest.mark.exhaustive),
        (("--accumulation", 3, "--clip", 0.5, "--amp"), 3, 0.5),
    ],
)
def test_a_script_averages_its_parameters_after_each_step(
    tmp_path: Path, arguments: tuple[object, ...], accumulation: int, clip: float
) -> None:
    saved = tmp_path / "digits.pt"
    script = commands.torchrun("train_digits.py", "--save", saved, *arguments, workers=WORKERS)
    done = commands.headway("run", "--plan", plan(tmp_path, groups="all"), "--", *script, timeout_s=150)
    assert done.returncode == 0, done.stderr
    assert "partial all-reduce, all groups: ranks' models differ until" in done.stderr
    assert "worker 0's own" not in done.stderr  # after each step all have the same
    found = torch.load(saved, weights_only=True)
    expected = reference(2, accumulation, clip)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("groups", ["all", pytest.param("static", marks=pytest.mark.exhaustive)])
def test_a_script_averages_the_parameters_of_its_hosts_after_each_step(tmp_path: Path, groups: str) -> None:
    """The ranks of a host all-reduce gradients: accumulated, unscaled and clipped as under DistributedDataParallel."""
    saved = tmp_path / "digits.pt"
    scaled = (
        () if groups == "static" else ("--amp",)
    )  # scalers are refused where hosts have to make the same steps
    script = commands.torchrun(
        "train_digits.py", "--save", saved, "--accumulation", 3, "--clip", 0.5, *scaled, workers=WORKERS
    )
    planned = plan(tmp_path, groups=groups, within_hosts="all-reduce", hosts=(2, 2))
    done = commands.headway("run", "--plan", planned, "--", *script, timeout_s=150)
    assert done.returncode == 0, done.stderr
    assert f"{groups} groups of hosts, all-reduce within: hosts' models differ until" in done.stderr
    assert "alone" not in done.stderr  # after each step all have the same
    found = torch.load(saved, weights_only=True)
    expected = reference(2, 3, 0.5, ranks_a_worker=2)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)


def test_hosts_of_a_lab_are_found_by_themselves(tmp_path: Path) -> None:
    saved = tmp_path / "digits.pt"
    planned = plan(tmp_path, groups="static", within_hosts="all-reduce")
    done = commands.headway(
        "lab", "run", "--hosts", 2, "--workers-per-host", 2, "--rate", "400mbit", "--",
        sys.executable, "-m", "headway", "run", "--plan", planned, "--",
        sys.executable, commands.SCRIPTS / "train_digits.py", "--save", saved, timeout_s=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "one host" not in done.stderr
    found = torch.load(saved, weights_only=True)
    for name, tensor in reference(2, 1, 0.0, ranks_a_worker=2).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)


def test_groups_that_are_drawn_before_do_not_wait_for_a_rank_in_the_scripts_barrier(tmp_path: Path) -> None:
    saved = tmp_path / "digits.pt"
    script = commands.torchrun("train_digits.py", "--save", saved, workers=WORKERS)
    planned = plan(tmp_path, groups="group-buffer", group_size=2, staleness=1)
    done = commands.headway("run", "--plan", planned, "--", *script, timeout_s=150)
    assert done.returncode == 0, done.stderr
    assert "epoch 1: accuracy 0." in done.stdout
    assert "is worker 0's own after 30 steps, last averaged with" in " ".join(done.stderr.split())


def test_the_others_go_on_when_one_is_killed_and_nobody_ends_them(tmp_path: Path) -> None:
    saved = tmp_path / "digits.pt"
    script = commands.SCRIPTS / "train_digits.py"
    done = commands.headway(
        "run", "--plan", plan(tmp_path, 3, groups="first-come", group_size=3), "--",
        sys.executable, commands.SCRIPTS / "start_and_lose_one.py", 3,
        sys.executable, script, "--save", saved, "--evaluate", "first", "--epochs", 4, timeout_s=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rank 1: epoch 3" in done.stdout
    assert "rank 0: epoch 3" in done.stdout
    assert saved.exists()
