from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

import pytest
from tests import limits

from headway.cli.list_ import KINDS
from headway.cli.main import COMMANDS, COMPLETION, PIPE_CLOSED, SUFFIXED, main, run
from headway.cli.record import parse_steps
from headway.errors import UserError


def test_every_command_is_there_and_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        module = f"{name}_" if name in SUFFIXED else name
        assert importlib.import_module(f"headway.cli.{module}")
        assert run([name, "--help"]) == 0
        assert "Usage: headway" in capsys.readouterr().out
    assert run(["--version"]) == 0


def test_steps_are_read_as_a_range() -> None:
    assert parse_steps("5:25") == (5, 25)
    for text in ("5", "25:5", "0:3", "a:b", "5:25:30", "-1:4", ""):
        with pytest.raises(UserError):
            parse_steps(text)


def test_bad_usage_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("headway: Missing argument")
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["optimise"], "No such command 'optimise'. Did you mean optimize? See headway --help."),
        (["nothing-like-it"], "No such command 'nothing-like-it'. See headway --help."),
        (["settings", "plan.yaml"], "Missing option '--for'. Choose from: ddp, fsdp2, "),
        (["diagnose", "trace", "--htlm", "x"], "See headway diagnose --help."),
        (
            ["record", "torchrun", "--nproc-per-node", "2", "train.py"],
            "No such option '--nproc-per-node'. The command goes after --: headway record … -- torchrun train.py.",
        ),
        (["predict", "bert-larg", "--cluster", "edr-100g-pcie"], "Did you mean bert-large?"),
        (["predict", "bert-large", "--cluster", "edr"], "Did you mean edr-100g-pcie?"),
        (["lab", "run", "--host", "x", "y", "z"], "See headway lab run --help."),
    ],
)
def test_errors_of_usage_say_where_help_is(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    said = capsys.readouterr()
    assert error in said.err
    assert said.err.startswith("headway: ")
    assert (said.err.count("\n"), said.out) == (1, "")


@pytest.mark.parametrize("arguments", [[], ["lab"], ["help"], ["help", "lab"], ["help", "lab", "run"]])
def test_help_is_an_answer(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 0
    said = capsys.readouterr()
    assert said.out.startswith(
        " ".join(["Usage: headway", *arguments[1 if arguments[:1] == ["help"] else 0 :]])
    )
    assert said.err == ""


def test_the_version_has_a_short_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["-V"]) == 0
    assert capsys.readouterr().out.startswith("headway, version ")


def test_shells_complete_commands_and_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def completed(instruction: str, words: str = "") -> str:
        monkeypatch.setenv(COMPLETION, instruction)
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        with pytest.raises(SystemExit) as ended:
            main([])
        assert ended.value.code == 0
        return capsys.readouterr().out

    assert "complete" in completed("zsh_source")
    assert completed("bash_complete", "headway re").split() == ["plain,record", "plain,replay"]
    assert completed("bash_complete", "headway list cl").split() == ["plain,clusters"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_there_is_can_be_listed(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", kind, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert run(["list", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= len(rows)
    expected = {
        "models": "bert-large",
        "devices": "a100",
        "clusters": "gloo-10gbe",
        "strategies": "decoupled",
    }
    expected |= {"passes": "recompute", "codecs": "int8", "readers": "kineto"}
    assert kind == "plugins" or expected[kind] in [row["name"] for row in rows]


def test_a_pipe_that_nobody_reads_is_not_a_slower_job() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = "from headway.cli.main import main; main(['--help'])"
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-c", code],
            check=False,
            stdout=pipe,
            stderr=subprocess.PIPE,
            timeout=limits.stretched(60),
        )
    assert (done.returncode, done.stderr) == (PIPE_CLOSED, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device here")
def test_a_full_disk_is_one_line_and_status_2() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "headway", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("headway: cannot write the output")
    assert done.stderr.count("\n") == 1
