"""What goes wrong in an observer stays there: the job computes what it would have, and says that recording stops."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import headway
from headway import torch_private
from headway.errors import HeadwayError
from headway.memory.pass_watch import Allocations, PassMemoryWatch
from headway.recording import collectives, modules, patching
from headway.recording.chains import ChainWatch, _Look
from headway.recording.collectives import CollectiveTap
from headway.recording.connections import ConnectionWatch
from headway.recording.grad_access import AccessWatch, ReadWatch
from headway.recording.memory import MemoryWatch
from headway.recording.messages import MessageWatch
from headway.recording.modules import ModuleWatch
from headway.recording.recorder import Recorder, RecordOptions
from headway.recording.step_clock import StepClock
from headway.recording.watch import Watch
from headway.recording.watches import InputWatch, PauseWatch, UpdateWatch
from headway.trace.events import Event, Kind

STEPS, FIRST, STOP = 7, 2, 6

FAULTS: list[tuple[Any, str]] = [
    (Recorder, "watch"), (Recorder, "_close_step"), (Recorder, "_open_step"), (Recorder, "_forget"),
    (Recorder, "_write"), (StepClock, "counts"), (ModuleWatch, "_enter_pass"),
    (ModuleWatch, "_leave_pass"), (ModuleWatch, "mark_begin"), (ModuleWatch, "backward"), (modules, "_holds"),
    (ReadWatch, "script_reads_end"), (ReadWatch, "backward_ended"), (ReadWatch, "stepped"), (ReadWatch, "_read_of"),
    (AccessWatch, "_note"), (CollectiveTap, "release_finished"), (collectives, "_size_bytes"),
    (ConnectionWatch, "recording_begins"), (ConnectionWatch, "step_ends"), (PauseWatch, "_ended"),
    (PauseWatch, "_collecting"), (MessageWatch, "_waited"), (UpdateWatch, "step_begins"),
    (UpdateWatch, "step_ends"), (UpdateWatch, "_begin"),
    (InputWatch, "_is_recording"),
]  # fmt: skip
HARMLESS: list[tuple[Any, str]] = [
    (ChainWatch, "_ends"), (_Look, "put_out"), (_Look, "begins"), (MemoryWatch, "_begin"),
    (PassMemoryWatch, "module_begins"), (PassMemoryWatch, "gradient_done"), (Allocations, "_look"),
]  # fmt: skip


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained() -> list[float]:
    """The losses of a job that does what observers look at: it evaluates, clips, logs, collects and waits."""
    torch.manual_seed(0)
    first, last = nn.Linear(8, 16), nn.Linear(16, 4)
    net = nn.Sequential(first, nn.ReLU(), last)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step, (x,) in enumerate(DataLoader(TensorDataset(torch.randn(4 * STEPS, 8)), batch_size=4)):
        with torch.inference_mode():
            model(x)
        losses.append(model(x).square().mean())
        losses[-1].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        losses.append(gradient_of(last.weight))
        if step % 2:
            optimizer.step()
        else:
            optimizer.step(lambda x=x: model(x).square().mean())
        losses.append(first.weight.sum())
        optimizer.zero_grad()
        dist.all_reduce(torch.ones(4), async_op=True).wait()
        gc.collect(0)
    return [float(loss.detach()) for loss in losses]


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    norm: torch.Tensor = gradient.norm()
    return norm


def stock() -> tuple[Any, ...]:
    return (
        torch.autograd.backward, dist.destroy_process_group, torch.compile, torch.save, dist.Work.wait,
        DistributedDataParallel.__init__, len(gc.callbacks),
    )  # fmt: skip


@pytest.mark.usefixtures("group")
def test_a_fault_of_an_observer_ends_the_recording_and_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, functions = trained(), stock()
    for number, (owner, name) in enumerate(FAULTS + HARMLESS):

        def fails(*_args: Any, **_kwargs: Any) -> None:
            raise LookupError("injected")

        with monkeypatch.context() as patched:
            if name == "_is_recording":
                patched.setattr(InputWatch, "__init__", _blind(InputWatch.__init__, fails))
            else:
                patched.setattr(owner, name, fails)
            out = tmp_path / str(number)
            why = "injected"
            try:
                with headway.record(out, first_step=FIRST, stop_step=STOP):
                    losses = trained()
            except HeadwayError as nothing:  # at the end, which is how one learns of it
                why = str(nothing)
        assert "injected" in why
        said = capsys.readouterr().err
        assert losses == expected, name
        assert stock() == functions, name
        assert torch_private.dispatch_modes() == [], name
        if (owner, name) in HARMLESS:
            assert said == "", (name, said)
            assert headway.load_trace(out).steps == tuple(range(FIRST, STOP))
        else:
            assert said.count("injected") == 1, (name, said)
            assert len(said.splitlines()) == 1, (name, said)


class _Diary(Watch):
    """Notes which of its methods the recorder calls, one word a step."""

    def __init__(self) -> None:
        self.moments: list[str] = []

    def attach(self) -> None:
        self.moments.append("attach")

    def detach(self) -> None:
        self.moments.append("detach")

    def step_begins(self, step: int) -> None:
        self.moments.append(f"begin {step}")

    def recording_begins(self, now_ns: int) -> None:
        self.moments.append("record")

    def update_begins(self) -> None:
        self.moments.append("update")

    def step_ends(self, step: int, now_ns: int, *, recorded: bool) -> None:
        self.moments.append(f"end {step}{' recorded' if recorded else ''}")

    def add_rows(self, rows: list[Event]) -> list[Event]:
        return [*rows, next(row for row in rows if row.kind == Kind.STEP)._replace(kind="diary")]

    def notes(self, rows: Sequence[Event]) -> Sequence[str]:
        return [f"{sum(row.kind == 'diary' for row in rows)} entry"]

    def forget(self) -> None:
        self.moments.append("forget")


@pytest.mark.usefixtures("group")
def test_a_watch_needs_nothing_but_a_place_in_the_recorders_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary, construct = _Diary(), Recorder.__init__

    def constructed(self: Recorder, options: RecordOptions) -> None:
        construct(self, options)
        self._watches.append(diary)

    monkeypatch.setattr(Recorder, "__init__", constructed)
    with headway.record(tmp_path / "trace", first_step=2, stop_step=3):
        trained()
    assert diary.moments == [
        "attach", "update", "end 0", "begin 1", "update", "end 1", "begin 2", "record", "update", "end 2 recorded",
        "begin 3", "detach", "forget",
    ]  # fmt: skip
    trace = headway.load_trace(tmp_path / "trace")
    assert [row.step for row in trace.events[0].of_kind("diary")] == [2]
    assert trace.manifest.notes == ("1 entry",)


def _blind(construct: Any, fails: Any) -> Any:
    def constructed(self: Any, put: Any, _is_recording: Any) -> None:
        construct(self, put, fails)

    return constructed


@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_a_function_that_is_observed_does_what_it_does(when: str, capsys: pytest.CaptureFixture[str]) -> None:
    calls = []

    class Owner:
        @staticmethod
        def act(value: int) -> int:
            calls.append(value)
            if value < 0:
                raise ValueError("the job's own")
            return 2 * value

    def observe(original: Any, *args: Any) -> Any:
        if when == "before":
            raise LookupError("observer")
        try:
            return original(*args)
        finally:
            if when == "after":
                raise LookupError("observer")

    take_off = patching.patch_method(Owner, "act", observe)
    assert Owner.act(3) == 6
    with pytest.raises(ValueError, match="the job's own"):
        Owner.act(-1)
    assert calls == [3, -1]  # never twice
    take_off()
    assert ("observer" in capsys.readouterr().err) is (when != "never")


def test_an_interrupt_in_an_observer_is_the_jobs() -> None:
    def observe(_original: Any) -> None:
        raise KeyboardInterrupt

    class Owner:
        act = staticmethod(lambda: 1)

    patching.patch_method(Owner, "act", observe)
    with pytest.raises(KeyboardInterrupt):
        Owner.act()
