"""``headway probe`` with logs of nccl-tests, which needs no ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.network.test_nccl_tests import log

from headway.cli.main import run
from headway.cluster import Cluster


def test_a_cluster_file_from_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = []
    for hosts in (2, 4):
        path = tmp_path / f"{hosts}.log"
        path.write_text(log(hosts, 8, 0.9, 1.0))
        logs += ["--nccl-tests", str(path)]
    out = tmp_path / "cluster.yaml"
    assert run(["probe", *logs, "-o", str(out)]) == 0
    assert capsys.readouterr().out.startswith("4 hosts of 8 workers, ")
    cluster = Cluster.load(out)
    assert cluster.nccl is not None
    assert cluster.nccl.cards_gb_s == 48.0
    assert (
        run(["predict", "--collective", "all-reduce", "--bytes", "64MiB", "--cluster", str(out), "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["workers"] == 32


def test_what_is_no_log_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("nothing")
    assert run(["probe", "--nccl-tests", str(path), "-o", str(tmp_path / "c.yaml")]) == 2
    assert "is not a log of nccl-tests; " in capsys.readouterr().err
    assert run(["probe", "--nccl-tests", str(tmp_path / "gone.log"), "-o", str(tmp_path / "c.yaml")]) == 2
    assert not (tmp_path / "c.yaml").exists()
