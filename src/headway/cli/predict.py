"""``headway predict``: the step of a model on a cluster, without a trace."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from headway.cli import output
from headway.cli.output import allow_option
from headway.errors import UserError, one_line
from headway.units import counted, format_bytes

if TYPE_CHECKING:
    from headway.cluster import Cluster
    from headway.prediction.calibration import Calibration, MeasuredStep
    from headway.prediction.replayed import Prediction
    from headway.prediction.scaling import Crossover
    from headway.prediction.workload import Workload
    from headway.simulator.what_if import WhatIf
    from headway.strategies.base import Strategy

MOST_SIZES = 64
MOST_SAMPLES = 10**9
LONGEST = 2000  # of a sentence, in characters


@click.command()
@click.argument("model", required=False)
@click.option(
    "--cluster",
    "cluster_name",
    required=True,
    metavar="CLUSTER",
    help="A cluster file, or the name of one that ships.",
)
@click.option("--strategy", "strategies", multiple=True, metavar="STRATEGY",
              help="Such as ddp, decoupled:gather=gradients or a plan file; may be repeated.")  # fmt: skip
@click.option(
    "--workers",
    "workers_text",
    metavar="N,N",
    help="World sizes; by default powers of two up to the cluster's.",
)
@click.option(
    "--device",
    "device_name",
    metavar="DEVICE",
    help="The device that computes: a name, or 'here' to time this machine's.",
)
@click.option(
    "--what-if", "what_ifs", multiple=True, metavar="K=V",
    help="bandwidth=2x, latency=0.5x, compute=0.5x (half the time), bandwidth:HOST=0.5x, compute:RANK=2x, "
    "traffic:HOST:HOST=100mbit or 100mbit@0s-2s, random-slowdown:10%=3x, and under strategies whose ranks go on "
    "without each other dies:RANK@2s, joins:RANK@5s; may be repeated.",
)  # fmt: skip
@click.option("--optimizer", "optimizer_name", default="momentum", show_default=True, metavar="NAME",
              help="sgd, momentum or adam.")  # fmt: skip
@click.option("--precision", metavar="NAME",
              help="fp32 (the default, without tensor cores), tf32, bf16 or fp16 (mixed precision).")  # fmt: skip
@click.option("--batch", type=click.IntRange(1, MOST_SAMPLES), metavar="N",
              help="Samples of each worker; by default the model's own.")  # fmt: skip
@click.option("--global-batch", type=click.IntRange(1, MOST_SAMPLES), metavar="N",
              help="Samples of all workers together, which share them out at every world size.")  # fmt: skip
@click.option("--measured", "measured_texts", multiple=True, metavar="N=TIME",
              help="A step of so many workers, or N@SAMPLES=TIME, measured under the first strategy; may be "
              "repeated.")  # fmt: skip
@click.option("--collective", "collective_name", metavar="KIND",
              help="Time one collective instead of a step: all-reduce, all-gather or reduce-scatter.")  # fmt: skip
@click.option(
    "--bytes",
    "size_text",
    metavar="SIZE",
    help="The whole tensor's size, with --collective: 1GB or 64MiB.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(path_type=Path),
    help="Plot step and efficiency over world sizes to a file.",
)
@allow_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def predict(
    model: str | None,
    cluster_name: str,
    strategies: tuple[str, ...],
    workers_text: str | None,
    device_name: str | None,
    what_ifs: tuple[str, ...],
    optimizer_name: str,
    precision: str | None,
    batch: int | None,
    global_batch: int | None,
    measured_texts: tuple[str, ...],
    collective_name: str | None,
    size_text: str | None,
    plot_path: Path | None,
    allow: tuple[str, ...],
    as_json: bool,
) -> None:
    """Predict the step of MODEL on a cluster, or the time of one collective, without any trace.

    MODEL is a model that ships (resnet50, bert-large, gpt2, ...), a layer table in a YAML file, or a function that
    builds a torch module, as in package.module:function.
    """
    from headway.prediction.calibration import measured_steps
    from headway.prediction.clusters import cluster_named
    from headway.prediction.models import batch_of, workloads_named
    from headway.prediction.scaling import best_of, crossovers, scaling
    from headway.prediction.strategies import strategies_named
    from headway.simulator.what_if import WhatIf

    what_if = WhatIf.parse(what_ifs)
    if collective_name is not None or size_text is not None:
        _print_collective(
            collective_name, size_text, model, what_if.apply(cluster_named(cluster_name)), as_json
        )
        return
    if model is None:
        raise click.UsageError(
            "Missing argument 'MODEL'. To time a collective, give --collective and --bytes."
        )
    if plot_path is not None:
        from headway.report.scaling import kind_of_picture

        kind_of_picture(plot_path)  # before the work, not after it
    begun = time.perf_counter()
    cluster = cluster_named(cluster_name)
    world_sizes = _world_sizes(workers_text, cluster.world_size)
    if workers_text is None and global_batch is not None:
        world_sizes = [n for n in world_sizes if not global_batch % n or n == cluster.world_size]
    batches = {workers: batch_of(workers, batch, global_batch) for workers in world_sizes}
    measured = {
        step: step.samples or batch_of(step.workers, batch, global_batch)
        for step in measured_steps(measured_texts)
    }
    with output.progress("costing the model"):
        workloads = workloads_named(
            model, device_name, optimizer_name, [*batches.values(), *measured.values()], precision
        )
    sized = {workers: workloads[samples] for workers, samples in batches.items()}
    chosen = strategies_named(strategies, sized[world_sizes[-1]])
    measured_workloads = {step: workloads[samples] for step, samples in measured.items()}
    calibration = _calibrated(measured_workloads, cluster, chosen, what_if)
    if calibration is not None:
        what_if = calibration.what_if
        sized = {workers: calibration.corrected(each) for workers, each in sized.items()}
    workload = sized[world_sizes[-1]]
    notes = dict.fromkeys(note for each in sized.values() for note in each.notes)
    with output.progress("predicting") as advance:
        found = scaling(
            workload, cluster, chosen, world_sizes, advance, what_if, all_needed=bool(strategies), sized=sized
        )
    if plot_path is not None:
        from headway.report.scaling import draw_scaling

        shared = f"{global_batch} samples in all" if global_batch else f"{workload.batch} a worker"
        draw_scaling(found, f"{workload.name}, {shared}, {workload.times}", plot_path)
    largest = [each for each in found if each.workers == world_sizes[-1]]
    best = best_of(largest, allow)
    overtakings = crossovers(found)
    close = {
        workers: _as_fast([each for each in found if each.workers == workers], workload)
        for workers in world_sizes
    }
    if as_json:
        ranks = [str(rank) for rank in range(best.workers)]
        output.print_document(
            "prediction",
            {
                "model": workload.name,
                "cluster": cluster.source,
                "computation": workload.times,
                "samples": best.samples,
                "notes": list(notes),
                "workers": best.workers,
                "what_if": what_if.describe(),
                **({} if calibration is None else {"calibration": asdict(calibration)}),
                "strategy": best.strategy,
                "changes_training": best.changes_training,
                "recommended": best.recommended(allow),
                "step_ms": best.step_ms,
                "uncertainty_ms": best.uncertainty_ms,
                "breakdown_ms": dict.fromkeys(ranks, best.breakdown_ms),
                "peak_bytes": dict.fromkeys(ranks, best.peak_bytes),
                "operations": sum(each.operations for each in found),
                "elapsed_s": time.perf_counter() - begun,
                "predictions": [
                    {**each.to_document(), "may_be_fastest": each in close[each.workers]} for each in found
                ],
                "crossovers": [overtaking.to_document() for overtaking in overtakings],
            },
        )
        return
    said = [*([] if calibration is None else [calibration.describe()]), *notes]
    _print_steps(
        found,
        best,
        allow,
        workload,
        cluster,
        WhatIf.parse(what_ifs),
        close,
        overtakings,
        said,
        compared=not strategies,
    )


def _print_steps(
    found: list[Prediction],
    best: Prediction,
    allow: tuple[str, ...],
    workload: Workload,
    cluster: Cluster,
    what_if: WhatIf,
    close: Mapping[int, list[Prediction]],
    overtakings: Sequence[Crossover],
    said: Sequence[str],
    *,
    compared: bool,
) -> None:
    """Print the answer, ``said`` and the table. ``compared`` are strategies that nobody named."""
    largest = [each for each in found if each.workers == best.workers]
    console = output.console()
    others = [each for each in largest if each is not best]
    second = f" ({others[0].strategy}: {others[0].step_ms:.1f})" if others else ""
    how = ", ".join(filter(None, [best.strategy, what_if.describe()]))
    answer = (
        f"{best.step_ms:.1f} ± {best.uncertainty_ms:.1f} ms a step of {workload.name} on "
        f"{counted(best.workers, 'worker')} of {counted(best.samples, 'sample')} each with {how}{second}: "
        f"{best.samples_per_s:.0f} samples/s, {best.efficiency:.0%} of what they would reach without communication."
    )
    sentences = [answer, *said, *_of_other_training(best, largest, allow)]
    if others and any(each in close[best.workers] for each in others if best in close[best.workers]):
        sentences.append("Strategies marked ≈ cannot be told apart from the fastest.")
    if others and compared:
        sentences.append(
            "Every strategy has its default buckets here; tuned ones may be ranked otherwise. Compare them with "
            "--strategy, as in ddp:bucket_cap_mb=100 or decoupled:bucket_cap_bytes=100000000."
        )
    for sentence in sentences:
        console.print(one_line(sentence, LONGEST))
    console.print(_table(found, workload, close))
    for overtaking in overtakings:
        between = f"between {overtaking.below} and {overtaking.above} workers"
        overtakes = f"{overtaking.to} overtakes {overtaking.of} {between}."
        console.print(one_line(overtakes, LONGEST))
    notes = [f"{best.strategy}: {note}." for note in best.notes]
    notes += [f"Note: {each.strategy}: {said}." for each in largest for said in each.ignored]
    for note in notes:
        console.print(one_line(note, LONGEST))
    source = cluster.source.rstrip(".")
    basis = f"Links: {source}. Computation: {workload.times}, {workload.batch} a worker."
    console.print(one_line(basis, LONGEST))


def _calibrated(
    measured: Mapping[MeasuredStep, Workload],
    cluster: Cluster,
    chosen: Mapping[str, Strategy],
    what_if: WhatIf,
) -> Calibration | None:
    from headway.prediction.calibration import calibrate
    from headway.simulator.what_if import WhatIf as Plain

    if not measured:
        return None
    if what_if != Plain():
        raise UserError(
            "--measured and --what-if do not go together", got=what_if.describe(), expected="one of them"
        )
    name = next(iter(chosen))
    with output.progress("calibrating"):
        return calibrate(measured, cluster, name, chosen[name])


def _print_collective(
    name: str | None, size_text: str | None, model: str | None, cluster: Cluster, as_json: bool
) -> None:
    from headway.prediction.collective import collective_time
    from headway.units import parse_size_bytes

    if name is None or size_text is None or model is not None:
        raise UserError(
            "--collective and --bytes go together, and without a model",
            got=f"--collective {name or 'left out'}, --bytes {size_text or 'left out'}",
            expected="such as --collective all-gather --bytes 1GB",
        )
    found = collective_time(cluster, name, parse_size_bytes(size_text, "--bytes"))
    if as_json:
        output.print_document("collective", {**found.to_document(), "cluster": cluster.source})
        return
    by = found.algorithm.replace("_", " ") + (f", {found.protocol.upper()}" if found.protocol else "")
    console = output.console()
    console.print(
        f"{_duration(found.time_us)} ± {_duration(found.uncertainty_us)} for {name} of "
        f"{format_bytes(found.size_bytes)} over {found.workers} workers on "
        f"{found.hosts} host{'s' if found.hosts > 1 else ''}, by {by}: {found.tensor_gb_s:.3g} GB/s of the tensor, "
        f"{found.bus_gb_s:.3g} GB/s on the bus."
    )
    console.print(f"No algorithm that adds up on the workers takes less than {_duration(found.bound_us)}.")
    console.print(one_line(f"Links: {cluster.source}", LONGEST))


def _duration(time_us: float) -> str:
    return f"{time_us / 1e3:.4g} ms" if time_us >= 1000 else f"{time_us:.4g} us"


def _of_other_training(best: Prediction, largest: list[Prediction], allow: tuple[str, ...]) -> list[str]:
    """What must be said of strategies that change what is trained: of the chosen one, or of those not chosen."""
    if best.recommended(allow):
        said = [f"It changes what is trained: {best.changes_training}."] if best.changes_training else []
        faster = [each for each in largest if not each.recommended(allow) and each.step_ms < best.step_ms]
        return said + [
            f"{each.strategy} would take {each.step_ms:.1f} ms, but changes what is trained: {each.changes_training}. "
            f"It is recommended only with --allow {' --allow '.join(each.permissions)}."
            for each in faster
        ]
    return [
        f"This is no recommendation, as it changes what is trained: {best.changes_training}. Compare it with a "
        f"strategy that does not, or give --allow {' --allow '.join(best.permissions)}."
    ]


def _as_fast(predictions: list[Prediction], workload: Workload) -> list[Prediction]:
    """Of predictions for as many workers, the fastest and those that errors may make as fast."""
    from headway.prediction.scaling import indistinct

    fastest = min(predictions, key=lambda each: each.step_ms, default=None)
    return [
        prediction
        for prediction in predictions
        if fastest is not None
        and (prediction is fastest or indistinct(prediction, fastest, workload.times_error))
    ]


def _table(predictions: list[Prediction], workload: Workload, close: Mapping[int, list[Prediction]]) -> Table:
    table = Table(
        "workers",
        "batch",
        "strategy",
        "ms a step",
        "exposed ms",
        "samples/s",
        "efficiency",
        "peak memory a worker",
    )
    for prediction in predictions:
        alike = close[prediction.workers]
        table.add_row(
            str(prediction.workers), str(prediction.samples),
            one_line(prediction.strategy) + " ‡" * bool(prediction.changes_training),
            f"{prediction.step_ms:.1f}" + " ≈" * (prediction in alike and len(alike) > 1),
            f"{prediction.exposed_ms:.1f}",
            f"{prediction.samples_per_s:.0f}", f"{prediction.efficiency:.0%}", format_bytes(prediction.peak_bytes),
        )  # fmt: skip
    computation_ms = workload.computation_ns / 1e6
    largest = max(each.workers for each in predictions)
    several = len({each.samples for each in predictions}) > 1
    at = f" with {counted(largest, 'worker')}" if several else ""
    said = [f"Computation takes {computation_ms:.1f} ms of each step{at}, the update included."]
    if several:
        said.append("Efficiency compares with workers that compute the same batch by themselves.")
    if workload.times_error:
        said.append(
            f"All steps may be off by ± {workload.times_error * computation_ms:.1f} ms together, as the times of "
            "layers may be; the order of strategies hardly depends on that."
        )
    if any(len(each) > 1 for each in close.values()):
        said.append("≈: cannot be told apart from the fastest with as many workers.")
    permissions = {name for each in predictions for name in each.permissions}
    if permissions:
        from headway.plan.permissions import changes_in_words

        said.append(f"‡: this strategy changes what is trained ({changes_in_words(permissions)}).")
    if any(each.is_mean_iteration for each in predictions):
        said.append("Where ranks do not wait for each other, a step is the mean iteration of a rank.")
    table.caption = " ".join(said)
    return table


def _world_sizes(text: str | None, most: int) -> list[int]:
    from headway.simulator.what_if import MAX_WORKERS

    if text is None:
        sizes = [1]
        while sizes[-1] * 2 < most:
            sizes.append(sizes[-1] * 2)
        return [*sizes, most] if most > 1 else sizes
    parts = text.split(",")
    form = f"numbers from 1 to {MAX_WORKERS} with commas between them, at most {MOST_SIZES}"
    if len(parts) > MOST_SIZES or not all(
        part.strip().isdecimal() and len(part.strip()) < 6 for part in parts
    ):
        raise UserError("--workers cannot be read", got=repr(text), expected=form)
    sizes = sorted({int(part) for part in parts})
    if not 1 <= sizes[0] <= sizes[-1] <= MAX_WORKERS:
        raise UserError("--workers is out of range", got=repr(text), expected=form)
    return sizes
