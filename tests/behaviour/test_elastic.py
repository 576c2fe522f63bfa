"""An elastic job that loses a host goes on with fewer workers under a plan that adapts, and trains the same."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from tests import limits, workers
from tests.behaviour.hierarchical_cases import SMALL
from tests.commands import SCRIPTS, communicate, free_port, headway
from tests.scripts.train_elastic import net, rows
from torch import nn

from headway.plan import Plan
from headway.strategies.adaptive.policy import AdaptiveStrategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decisions import read_journal
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.live.module_spec import model_spec
from headway.strategies.parameter_server.policy import ParameterServerStrategy
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.registry import adapting, plugin_of

STEPS = 260
AGENTS = 3

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


def started(folder: Path, plan: Path, port: int, number: int, decisions: Path) -> subprocess.Popen[str]:
    """One host of the job: its torchrun, with one rank, under the plan. The first keeps what hosts meet by."""
    meeting = f"is_host={int(number == 0)},last_call_timeout=15,keep_alive_interval=3"
    command = [
        sys.executable, "-m", "headway", "run", "--plan", plan, "--adapt", "--decisions", decisions, "--",
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2:3", "--nproc-per-node", "1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic",
        "--rdzv-conf", meeting, "--max-restarts", "3",
        "--monitor-interval", "0.1", "--local-addr", "127.0.0.1", SCRIPTS / "train_elastic.py", folder, STEPS,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env=environment,
    )  # fmt: skip


def die(host: subprocess.Popen[str]) -> None:
    """Kill all that a host runs at once, as when its power fails."""
    first = psutil.Process(host.pid)
    for process in [first, *first.children(recursive=True)]:  # torchrun gives each rank a session of its own
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    host.communicate()


def alone() -> nn.Module:
    """The same steps in one process, without checkpoints or deaths."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        inputs, wanted = rows(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), wanted).backward()
        optimizer.step()
    return model


def is_listened_at(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def all_train(checkpoint: Path) -> bool:
    return checkpoint.exists() and torch.load(checkpoint)["workers"] == AGENTS


def test_a_host_dies_and_the_others_go_on(tmp_path: Path) -> None:
    plan, decisions = tmp_path / "plan.yaml", tmp_path / "decisions.jsonl"
    strategy = DistributedDataParallelStrategy(bucket_caps_mb=(0.001, 0.02))
    Plan.data_parallel(strategy, AGENTS, model_spec(net())).save(plan)
    port = free_port()
    hosts = [started(tmp_path, plan, port, 0, decisions)]
    limit = limits.Limit(200, lambda: [each.pid for each in hosts])

    def wait_until(happened: Callable[[], bool]) -> None:
        while not happened():
            assert limit.left_s() > 0
            assert all(each.poll() is None for each in hosts), hosts[0].communicate()
            time.sleep(0.1)

    try:
        wait_until(lambda: is_listened_at(port))
        hosts += [started(tmp_path, plan, port, number, decisions) for number in range(1, AGENTS)]
        wait_until(lambda: all_train(tmp_path / "checkpoint.pt"))
        written = len(decisions.read_text())
        die(hosts[-1])
        said = [communicate(each, 150) for each in hosts[:-1]]
    finally:
        for each in hosts:
            if each.poll() is None:
                die(each)
    assert [each.returncode for each in hosts[:-1]] == [0, 0], said
    reference = alone().state_dict()
    for rank in range(AGENTS - 1):
        ended = torch.load(tmp_path / f"ended-{rank}.pt")
        assert ended["workers"] == AGENTS - 1
        assert ended["from"] > 0
        for name, values in ended["model"].items():
            torch.testing.assert_close(values, reference[name], rtol=1e-9, atol=1e-12)
    assert written <= len(decisions.read_text()), "what was written before stays"
    entries = [each for each in read_journal(decisions) if each.workers == AGENTS - 1]
    changed = [each for each in entries if "the plan is for 3 workers, and the job has 2" in each.reason]
    assert len(changed) == 1
    assert changed[0].switches
    assert any("tuned in" in each.reason or "faster" in each.reason for each in entries), entries
    told = headway("decisions", decisions, "--html", tmp_path / "page.html")
    assert told.returncode == 0, told.stderr


def test_without_it_another_number_of_workers_is_refused_and_so_is_another_model(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    planned = DecoupledStrategy(reduce_scatter="halving_doubling", by_size=(SMALL,))
    job = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3",
           SCRIPTS / "train_elastic.py", tmp_path, 5)  # fmt: skip
    Plan.data_parallel(planned, 2, model_spec(net())).save(plan)
    refused = headway("run", "--plan", plan, "--", *job)
    assert refused.returncode == 2
    assert "use --adapt" in refused.stderr
    goes_on = headway("run", "--plan", plan, "--adapt", "--", *job)
    assert goes_on.returncode == 0, goes_on.stderr
    assert "the plan is for 2 workers, and the job has 3: retuning its schedule" in goes_on.stderr
    Plan.data_parallel(planned, 2, model_spec(nn.Linear(2, 2))).save(plan)
    refused = headway("run", "--plan", plan, "--adapt", "--", *job)
    assert refused.returncode == 2
    assert "the plan is for another model" in refused.stderr


def test_plans_that_cannot_adapt_are_refused() -> None:
    """Casts would be lost, and of a compiled model stock DDP cannot be handed over."""
    cast = DistributedDataParallelStrategy.model_validate({"wire": [{"dtype": "bfloat16"}]})
    assert adapting(cast) is None
    assert adapting(DistributedDataParallelStrategy()) == AdaptiveStrategy(
        begin_as=DistributedDataParallelStrategy(), tune=False, adapt=True
    )
    servers = adapting(ParameterServerStrategy(bucket_cap_mb=2, shares=(1, 2, 3), pieces=4))
    assert isinstance(servers, AdaptiveStrategy)
    assert servers.begin_as == ParameterServerStrategy(bucket_cap_mb=2, shares=(1, 2, 3), pieces=4)
    assert AdaptiveStrategy.model_validate_json(servers.model_dump_json()) == servers
    elsewhere = plugin_of(servers).for_workers(servers)
    assert isinstance(elsewhere, AdaptiveStrategy)
    assert elsewhere.begin_as == ParameterServerStrategy(bucket_cap_mb=2)
    with pytest.raises(ValueError, match="must send gradients as they are"):
        AdaptiveStrategy(begin_as=cast)
    with pytest.raises(ValueError, match="cannot be pipeline"):
        AdaptiveStrategy(begin_as=PipelineStrategy())
    for reason in workers.run(2, "tests.behaviour.adapting_cases:compiled"):
        assert "cannot adapt a compiled model" in reason
