"""``headway demo``: the whole loop on this machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from headway.cli import output
from headway.errors import LaunchError

if TYPE_CHECKING:
    from headway.demo.loop import DemoResult

MARKER = ".headway-demo"
# All names that the demo writes in its folder: nothing else is ever removed.
WRITTEN = frozenset((
    MARKER, "demo.json", "trace", ".trace.recording", "cluster.yaml", "curve.json", "report.html", "plan.yaml",
    "plan-1.yaml", "plan-2.yaml", "plan-ddp.yaml", "plan-decoupled.yaml",
))  # fmt: skip


@click.command()
@click.option("-o", "--output", "folder", type=click.Path(path_type=Path), default=Path("headway-demo"),
              show_default=True, help="The folder for trace, plans and report; replaces an earlier demo.")  # fmt: skip
@click.option(
    "--model",
    type=click.Choice(["gpt", "digits"]),
    default="gpt",
    show_default=True,
    help="The model to train.",
)
@click.option(
    "--workers", type=click.IntRange(2, 4), default=2, show_default=True, help="The number of workers."
)
@click.option("--rate", default="200mbit", show_default=True, help="The rate of each worker's link.")
@click.option(
    "--rounds", type=click.IntRange(1, 20), default=2, show_default=True, help="How often each plan runs."
)
@click.option(
    "--mode",
    type=click.Choice(["auto", "root", "user", "loopback"]),
    default="auto",
    show_default=True,
    help="How to isolate hosts.",
)
@click.option(
    "--quick", is_flag=True,
    help="A shorter demo of about two minutes: smaller batches, and one plan besides stock DDP.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def demo(
    folder: Path, model: str, workers: int, rate: str, rounds: int, mode: str, quick: bool, as_json: bool
) -> None:
    """Record a small training job over a slow link, find a better plan, run it and compare."""
    from headway.lab.spec import parse_spec

    # Check the options before removing an earlier demo.
    lab = parse_spec({"hosts": workers, "rate": rate}, "the demo's lab")
    _make_room(folder)

    from headway.demo.loop import DemoOptions, run_demo

    options = (DemoOptions.quick if quick else DemoOptions)(
        folder=folder, lab=lab, model=model, rounds=rounds,
        mode=mode,  # type: ignore[arg-type]  # click has checked the choice
    )  # fmt: skip
    words = output.error_console()
    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn(), console=words
    )
    with bar:
        tasks: list[object] = []

        def stage(what: str) -> None:
            if tasks:
                bar.update(bar.task_ids[-1], total=1, completed=1)
            tasks.append(bar.add_task(f"[{len(tasks) + 1}/{options.stages}] {what}", total=None))
            if not words.is_terminal:
                words.print(f"[{len(tasks)}/{options.stages}] {what}")

        result = run_demo(options, stage)
        bar.update(bar.task_ids[-1], total=1, completed=1)
    if as_json:
        output.print_document("demo", result.to_document())
    else:
        _show(result)


def _make_room(folder: Path) -> None:
    """Remove an earlier demo's files from ``folder``; refuse a folder with any other files.

    Raises LaunchError, before anything is removed, if ``folder`` is not a folder or contains other files.
    """
    try:
        if folder.is_symlink() and not folder.exists():
            raise LaunchError("the demo's folder is a broken link", got=folder, fix="Choose another with -o.")
        if folder.exists() and not folder.is_dir():
            raise LaunchError("the demo's folder is a file", got=folder, fix="Choose another with -o.")
        folder.mkdir(parents=True, exist_ok=True)
        for path in _earlier_demo(folder):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        (folder / MARKER).touch()
    except OSError as failure:
        raise LaunchError(
            f"{folder} cannot be written", got=failure.strerror, fix="Choose another with -o."
        ) from None


def _earlier_demo(folder: Path) -> list[Path]:
    """The files of an earlier demo in ``folder``, its marker last."""
    there = sorted(folder.iterdir(), key=lambda path: (path.name == MARKER, path.name))
    foreign = [path.name for path in there if path.name not in WRITTEN]
    marked = any(path.name in (MARKER, "demo.json") and path.is_file() for path in there)
    if foreign or (there and not marked):
        raise LaunchError(
            "the demo's folder contains other files", got=(foreign or [there[0].name])[0],
            expected=f"a new folder, or that of an earlier demo, at {folder}", fix="Choose another with -o.",
        )  # fmt: skip
    return there


def _show(result: DemoResult) -> None:
    assert result.chosen is not None
    assert result.search_result is not None
    assert result.diagnosis is not None
    console = output.console()
    if result.keeps_recorded:
        console.print(
            "Keep stock DDP: no plan was faster by more than the noise between rounds "
            f"({result.stock.median_ms:.1f} ms a step)."
        )
    else:
        console.print(
            f"{result.speedup:.2f} times as fast as stock DDP: {result.chosen.name}, predicted "
            f"{result.chosen.candidate.predicted_ms:.1f} ms a step, measured {result.chosen.median_ms:.1f} ms."
        )
    for notice in dict.fromkeys(result.notices):
        console.print(notice)
    console.print(result.diagnosis.verdict)
    table = Table(box=None, pad_edge=False)
    table.add_column("plan")
    for header in ("predicted ms", "± ms", "measured ms", "± ms", "error", "times as fast", "each run, ms"):
        table.add_column(header, justify="right")
    for run in result.runs:
        table.add_row(
            run.name + " (taken)" * (run is result.chosen),
            f"{run.candidate.predicted_ms:.1f}",
            f"{run.candidate.uncertainty_ms:.1f}",
            f"{run.median_ms:.1f}",
            f"{run.measured.spread_ms:.1f}",
            f"{run.error:+.1%}",
            f"{result.speedup_of(run):.2f}",
            " ".join(f"{value:.1f}" for value in run.measured.runs_ms),
        )
    console.print(table)
    same = (
        "equal to the last bit"
        if result.loss_difference == 0
        else f"at most {result.loss_difference:.2e} apart"
    )
    console.print(
        f"Replay reproduces the recorded step with an error of {result.search_result.reproduction_error:+.1%}; "
        f"no plan can take less than {result.search_result.bound_ms:.1f} ms. Losses under all plans are {same}."
    )
    if not result.search_result.can_rank:
        console.print(
            "The machine was busy while recording: predictions are unreliable, so measurements decide."
        )
    elif result.has_machine_changed:
        console.print(
            "The machine changed after the recording: stock DDP was predicted at "
            f"{result.stock.candidate.predicted_ms:.1f} ms a step and measured at {result.stock.median_ms:.1f}. "
            "Predictions are unreliable, so measurements decide."
        )
    console.print("Computation is real, with one thread per worker; only the links are emulated.")
    console.print(f"Report: {result.report}")
    console.print(f"Plan: {(result.folder / 'plan.yaml').absolute()}")
