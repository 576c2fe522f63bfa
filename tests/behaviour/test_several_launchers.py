"""Two launchers of one job, as on two hosts, each under its own ``headway record``: one trace."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests import limits
from tests.commands import SCRIPTS, communicate, free_port, record_into
from torch import nn

from headway.diagnosis.diagnosis import diagnose
from headway.plan import Plan
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.live.module_spec import model_spec
from headway.trace.folder import load_trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

HOSTS = ("first", "second")
PRIVATE = ("unshare", "--user", "--map-root-user", "--mount")
LIMIT_S = 200


def launchers(
    outs: list[Path], *job: object, private: Path | None = None, plans: list[Path] | None = None
) -> list[subprocess.Popen[str]]:
    """Start the job on both "hosts", the second one with an empty file system of its own on ``private``.

    It is recorded into ``outs``, or run under ``plans``.
    """
    port = free_port()
    started = []
    for number, (name, out) in enumerate(zip(HOSTS, outs, strict=True)):
        # As Kubernetes tells torchrun, and so nothing on the command line.
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "HEADWAY_HOST": name, "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(number), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port),
        }  # fmt: skip
        follow = (sys.executable, "-m", "headway", "run", "--plan")
        record = (*(record_into(out) if plans is None else (*follow, plans[number])), "--")
        torchrun = (sys.executable, "-m", "torch.distributed.run", SCRIPTS / "train_launched.py", "plain")
        command = [str(word) for word in (*record, *torchrun, *job)]
        if private is not None and number == 1:
            inside = (
                f"mount -t tmpfs none {shlex.quote(str(private))}; mkdir -p {shlex.quote(str(out.parent))}"
            )
            command = [*PRIVATE, "sh", "-c", f"{inside}; exec {shlex.join(command)}"]
        started.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                start_new_session=True,
            )
        )
    return started


def test_a_shared_folder_gets_one_trace(tmp_path: Path) -> None:
    first, second = launchers([tmp_path / "trace"] * 2)
    (printed, said), (_, others) = communicate(first, LIMIT_S), communicate(second, LIMIT_S)
    assert (first.returncode, second.returncode) == (0, 0), said + others
    assert "Recorded 5 steps of 2 ranks" in printed
    assert f"headway: rank 0's launcher on first wrote {tmp_path / 'trace'}" in others
    trace = load_trace(tmp_path / "trace")
    assert trace.hosts == dict(enumerate(HOSTS))
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


def test_without_a_shared_folder_ranks_send_their_files(tmp_path: Path) -> None:
    permitted = subprocess.run(
        [*PRIVATE, "mount", "-t", "tmpfs", "none", str(tmp_path)],
        capture_output=True,
        timeout=limits.stretched(30),
        check=False,
    )
    if permitted.returncode:
        pytest.skip("no file systems of one's own here")
    out = tmp_path / "local" / "trace"
    first, second = launchers([out, out], private=tmp_path)
    (printed, said), (_, others) = communicate(first, LIMIT_S), communicate(second, LIMIT_S)
    assert (first.returncode, second.returncode) == (0, 0), said + others
    assert "Recorded 5 steps of 2 ranks" in printed
    assert "over the job's store to rank 0 on first" in others
    assert load_trace(out).hosts == dict(enumerate(HOSTS))


def test_a_host_that_dies_leaves_the_others_in_the_trace(tmp_path: Path) -> None:
    first, second = launchers([tmp_path / "trace"] * 2, "--steps", 100_000, "--pause-s", 0.02, "--dies-at", 6)
    _, said = communicate(first, LIMIT_S)
    os.killpg(second.pid, signal.SIGKILL)
    communicate(second, LIMIT_S)
    assert first.returncode == 2, said
    assert "contains the steps up to then" in said.splitlines()[-1]
    trace = load_trace(tmp_path / "trace")
    assert trace.missing_ranks == (1,)
    assert "rank 1" in trace.manifest.notes[0]
    assert diagnose(trace).verdict


def test_a_refusal_on_one_host_is_the_last_line_on_both(tmp_path: Path) -> None:
    models = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), nn.Linear(2, 2)
    plans = [tmp_path / "fits.yaml", tmp_path / "other.yaml"]
    for model, path in zip(models, plans, strict=True):
        made_for = model_spec(model)
        Plan.data_parallel(DistributedDataParallelStrategy(), 2, made_for).save(path)
    started = launchers([tmp_path] * 2, plans=plans)
    for launcher, (printed, errors) in [(launcher, communicate(launcher, LIMIT_S)) for launcher in started]:
        assert launcher.returncode == 2, errors
        assert errors.splitlines()[-1].startswith(
            "headway: ranks do not agree on the plan; got a plan for this model on rank 0, and for another model"
        )
        assert "stepped" not in printed
