from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.cli.main import run

CLUSTER = "edr-100g-pcie"


def test_the_first_line_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predict", "vgg16", "--cluster", CLUSTER, "--workers", "4,8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "ms a step of VGG-16 on 8 workers of 32 samples each with " in lines[0]
    assert "samples/s" in lines[0]
    assert any("ddp" in line and " 4 " in line for line in lines)
    assert "EDR InfiniBand" in lines[-1]


def test_one_collective(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["predict", "--collective", "all-gather", "--bytes", "1GB", "--cluster", "hdr-200g-nvlink"]
    assert run(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "for all-gather of 1.0 GB over 64 workers on 8 hosts, by ring, SIMPLE: " in lines[0]
    assert lines[1].startswith("No algorithm that reduces on the workers takes less than ")
    assert run([*asked, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["kind"], said["collective"], said["protocol"]) == ("collective", "all_gather", "simple")
    assert run(["predict", "--collective", "all-gather", "--cluster", CLUSTER]) == 2
    assert "--collective and --bytes must be used together" in capsys.readouterr().err


def test_measured_steps_correct_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["predict", "resnet50", "--cluster", CLUSTER, "--workers", "8", "--strategy", "ddp"]
    assert run([*asked, "--measured", "8=500ms"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("50") or lines[0].startswith("49")
    assert lines[1].startswith("Calibrated: computation takes ")
    assert run([*asked, "--measured", "8=500ms", "--what-if", "bandwidth=2x"]) == 2
    assert "--measured and --what-if cannot be combined" in capsys.readouterr().err


def test_a_global_batch_is_shared_out(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["predict", "resnet50", "--cluster", CLUSTER, "--workers", "1,4,16", "--strategy", "ddp"]
    asked += ["--precision", "bf16", "--global-batch", "512"]
    assert run(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " on 16 workers of 32 samples each with ddp: " in lines[0]
    assert lines[-1].endswith(
        "Computation: A100 SXM 40 GB (modelled) in bf16, 32 images of 224 x 224 a worker."
    )
    assert run([*asked, "--json"]) == 0
    predictions = json.loads(capsys.readouterr().out)["predictions"]
    assert [each["samples"] for each in predictions] == [512, 128, 32]
    steps_ms = [each["step_ms"] for each in predictions]
    assert steps_ms[0] > steps_ms[1] > steps_ms[2] > steps_ms[0] / 16
    for each in predictions:
        assert each["samples_per_s"] == pytest.approx(512 / each["step_ms"] * 1e3)


def test_steps_at_two_batch_sizes_are_met(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["predict", "resnet50", "--cluster", CLUSTER, "--workers", "4,8", "--strategy", "ddp", "--json"]
    asked += [
        "--global-batch",
        "1024",
        "--measured",
        "4=200ms",
        "--measured",
        "8=110ms",
        "--precision",
        "bf16",
    ]
    assert run(asked) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["calibration"]["fixed_ms"] != 0
    assert [each["step_ms"] for each in said["predictions"]] == pytest.approx([200, 110], rel=0.005)


def test_a_precision_that_nobody_chose_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["predict", "resnet50", "--cluster", CLUSTER, "--workers", "1", "--strategy", "ddp"]
    said = "Computed in fp32 without tensor cores"
    for options, expected in (([], True), (["--precision", "fp32"], False)):
        assert run([*asked, *options]) == 0
        assert (said in capsys.readouterr().out) == expected


def test_json_has_every_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--workers", "1,8", "--strategy", "ddp", "--strategy", "ddp:bucket_cap_mb=100", "--json"]
    assert run(["predict", "resnet50", "--cluster", CLUSTER, *options]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["kind"] == "prediction"
    assert {"step_ms", "breakdown_ms", "peak_bytes", "operations", "elapsed_s", "crossovers"} <= set(said)
    assert [(each["workers"], each["strategy"]) for each in said["predictions"]] == [
        (workers, strategy) for workers in (1, 8) for strategy in ("ddp", "ddp:bucket_cap_mb=100")
    ]
    assert said["step_ms"] == min(each["step_ms"] for each in said["predictions"][2:])
    assert set(said["breakdown_ms"]) == set(said["peak_bytes"]) == {str(rank) for rank in range(8)}
    assert sum(said["breakdown_ms"]["0"].values()) == pytest.approx(said["step_ms"])


def test_strategies_with_lists_and_alternatives(capsys: pytest.CaptureFixture[str]) -> None:
    named = [
        "ddp:bucket_caps_mb=[1,25,25]",
        "ddp:bucket_cap_mb=5|100",
        "pipeline:stages=2,split_points=[features.17]",
    ]
    options = ["--workers", "2", "--json"]
    for text in named:
        options += ["--strategy", text]
    assert run(["predict", "vgg16", "--cluster", CLUSTER, *options]) == 0
    said = [each["strategy"] for each in json.loads(capsys.readouterr().out)["predictions"]]
    assert said == [named[0], "ddp:bucket_cap_mb=5", "ddp:bucket_cap_mb=100", named[2]]


def test_servers_on_hosts_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    named = ["ddp", *(f"parameter_server:servers={servers}" for servers in (0, 2, 4))]
    options = [word for each in named for word in ("--strategy", each)]
    asked = ["predict", "vgg16", "--cluster", "gloo-10gbe", "--device", "v100", "--workers", "4", *options]
    assert run([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["predictions"]
    steps_ms = [each["step_ms"] for each in found]
    assert steps_ms[1:] == sorted(steps_ms[1:], reverse=True), "the more servers, the faster"
    assert all("predicted alone" in " ".join(each["ignored"]) for each in found[1:])
    assert run([*asked[:-1], "parameter_server:servers=1,pieces=2"]) == 2
    assert "servers excludes shares and pieces" in capsys.readouterr().err


def test_an_option_that_nccl_ignores_gains_nothing_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    ignored = "decoupled:reduce_scatter=hierarchical,wire={dtype: bfloat16}"
    options = ["--workers", "8", "--strategy", "decoupled", "--strategy", ignored]
    assert run(["predict", "vgg16", "--cluster", CLUSTER, *options, "--json"]) == 0
    plain, chosen = json.loads(capsys.readouterr().out)["predictions"]
    assert chosen["step_ms"] == plain["step_ms"]
    assert plain["ignored"] == []
    assert run(["predict", "vgg16", "--cluster", CLUSTER, *options]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Note: ")]
    assert notes == [f"Note: {ignored}: {each}." for each in chosen["ignored"]]


def test_the_table_says_what_it_compares(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predict", "resnet50", "--cluster", CLUSTER, "--workers", "1,8", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["predictions"]
    assert all(0 < each["efficiency"] <= 1 for each in said)
    assert all(each["may_be_fastest"] for each in said if each["workers"] == 1)
    for workers in (1, 8):
        own = [each for each in said if each["workers"] == workers]
        assert min(own, key=lambda each: each["step_ms"])["may_be_fastest"]
    assert run(["predict", "resnet50", "--cluster", CLUSTER, "--workers", "8"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Every strategy uses its default buckets; tuned buckets may change the ranking." in text
    assert "All steps share an error of up to ± " in text


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("scaling.png", "scaling.svg"):
        options = ["--workers", "2,4", "--strategy", "ddp", "--plot", str(tmp_path / name)]
        assert run(["predict", "vgg16", "--cluster", CLUSTER, *options]) == 0
    capsys.readouterr()
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "scaling.svg").read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-model", "--cluster", CLUSTER],
        ["vgg16"],
        ["vgg16", "--cluster", "no-such-cluster"],
        ["vgg16", "--cluster", "missing.yaml"],
        ["vgg16", "--cluster", CLUSTER, "--workers", "0"],
        ["vgg16", "--cluster", CLUSTER, "--workers", "2,x"],
        ["vgg16", "--cluster", CLUSTER, "--workers", "99999"],
        ["vgg16", "--cluster", CLUSTER, "--device", "abacus"],
        ["vgg16", "--cluster", CLUSTER, "--device", "here"],
        ["vgg16", "--cluster", CLUSTER, "--optimizer", "magic"],
        ["vgg16", "--cluster", CLUSTER, "--precision", "int3"],
        ["vgg16", "--cluster", CLUSTER, "--device", "v100", "--precision", "bf16"],
        ["vgg16", "--cluster", CLUSTER, "--workers", "3", "--global-batch", "64"],
        ["vgg16", "--cluster", CLUSTER, "--workers", "128", "--global-batch", "64"],
        ["vgg16", "--cluster", CLUSTER, "--batch", "4", "--global-batch", "64"],
        ["vgg16", "--cluster", CLUSTER, "--strategy", "magic"],
        ["vgg16", "--cluster", CLUSTER, "--strategy", "ddp:bucket_cap_mb=1,bucket_cap_mb=2"],
        ["vgg16", "--cluster", CLUSTER, "--strategy", "ddp:bucket_caps_mb=1,25"],
        ["vgg16", "--cluster", CLUSTER, "--strategy", "ddp:bucket_caps_mb=[1,25"],
        ["vgg16", "--cluster", CLUSTER, "--strategy", "ddp:bucket_cap_mb_list=[1,25]"],
        ["vgg16", "--cluster", CLUSTER, "--workers", "2", "--plot", "scaling.docx"],
        ["vgg16", "--cluster", CLUSTER, "--workers", "2", "--plot", "no/such/folder/scaling.png"],
        ["no_such_module:f", "--cluster", CLUSTER],
        ["missing.yaml", "--cluster", CLUSTER],
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["predict", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("headway: ")
    assert said.err.count("\n") == 1


FUNCTIONS = """
import sys
import torch

def noisy():
    print("\\x1b[31mnoise")
    return torch.nn.Linear(4, 2), torch.ones(3, 4)

def leaving():
    sys.exit(3)

def empty():
    return torch.nn.Linear(4, 2), torch.ones(0, 4)
"""


def test_what_functions_print_is_no_part_of_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_functions.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    options = ["--cluster", CLUSTER, "--workers", "2", "--json"]
    assert run(["predict", "own_functions:noisy", *options]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "prediction"
    for name, said in (("leaving", "SystemExit: 3"), ("empty", "have no samples")):
        assert run(["predict", f"own_functions:{name}", *options]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def test_foreign_text_cannot_forge_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = "{name: a, workers: 2, up_gbps: 1, down_gbps: 1}"
    (tmp_path / "own.yaml").write_text(f'hosts: [{host}]\nlatency_us: 1\nsource: "a\\e[31m\\nb"\n')
    options = ["--cluster", str(tmp_path / "own.yaml"), "--workers", "2", "--strategy", "ddp"]
    assert run(["predict", "vgg16", *options]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Links: a [31m b.")
