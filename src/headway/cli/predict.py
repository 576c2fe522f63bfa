"""``headway predict``: predict the step of a model on a cluster, without a trace."""

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
    help="World sizes; by default the powers of two up to the cluster's size.",
)
@click.option(
    "--device",
    "device_name",
    metavar="DEVICE",
    help="The compute device: a name, or 'here' to time this machine.",
)
@click.option(
    "--what-if", "what_ifs", multiple=True, metavar="K=V",
    help="bandwidth=2x, latency=0.5x, compute=0.5x (half the time), bandwidth:HOST=0.5x, compute:RANK=2x, "
    "traffic:HOST:HOST=100mbit or 100mbit@0s-2s, random-slowdown:10%=3x, and under strategies without synchronous "
    "steps dies:RANK@2s, joins:RANK@5s; may be repeated.",
)  # fmt: skip
@click.option("--optimizer", "optimizer_name", default="momentum", show_default=True, metavar="NAME",
              help="sgd, momentum or adam.")  # fmt: skip
@click.option("--precision", metavar="NAME",
              help="fp32 (the default, without tensor cores), tf32, bf16 or fp16 (mixed precision).")  # fmt: skip
@click.option("--batch", type=click.IntRange(1, MOST_SAMPLES), metavar="N",
              help="Samples per worker; by default the model's.")  # fmt: skip
@click.option("--global-batch", type=click.IntRange(1, MOST_SAMPLES), metavar="N",
              help="Samples of all workers together, at every world size.")  # fmt: skip
@click.option("--measured", "measured_texts", multiple=True, metavar="N=TIME",
              help="Calibrate with the step time of N workers measured under the first strategy, or "
              "N@SAMPLES=TIME; may be repeated.")  # fmt: skip
@click.option("--collective", "collective_name", metavar="KIND",
              help="Time one collective instead of a step: all-reduce, all-gather or reduce-scatter.")  # fmt: skip
@click.option(
    "--bytes",
    "size_text",
    metavar="SIZE",
    help="The size of the whole tensor, for --collective: 1GB or 64MiB.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(path_type=Path),
    help="Plot step time and efficiency over world sizes to this file.",
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
            "Missing argument 'MODEL'. To time a collective, use --collective and --bytes."
        )
    if plot_path is not None:
        from headway.report.scaling import kind_of_picture

        kind_of_picture(plot_path)  # fail before the work
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
        sized = {workers: calibration.corrected(workload) for workers, workload in sized.items()}
    workload = sized[world_sizes[-1]]
    notes = dict.fromkeys(note for scaled in sized.values() for note in scaled.notes)
    with output.progress("predicting") as advance:
        predictions = scaling(
            workload, cluster, chosen, world_sizes, advance, what_if, all_needed=bool(strategies), sized=sized
        )
    if plot_path is not None:
        from headway.report.scaling import draw_scaling

        shared = f"{global_batch} samples in all" if global_batch else f"{workload.batch} a worker"
        draw_scaling(predictions, f"{workload.name}, {shared}, {workload.times}", plot_path)
    largest = [prediction for prediction in predictions if prediction.workers == world_sizes[-1]]
    best = best_of(largest, allow)
    overtakings = crossovers(predictions)
    close = {
        workers: _fastest_within_errors(
            [prediction for prediction in predictions if prediction.workers == workers], workload
        )
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
                "operations": sum(prediction.operations for prediction in predictions),
                "elapsed_s": time.perf_counter() - begun,
                "predictions": [
                    {**prediction.to_document(), "may_be_fastest": prediction in close[prediction.workers]}
                    for prediction in predictions
                ],
                "crossovers": [overtaking.to_document() for overtaking in overtakings],
            },
        )
        return
    remarks = [*([] if calibration is None else [calibration.describe()]), *notes]
    _print_steps(
        predictions,
        best,
        allow,
        workload,
        cluster,
        WhatIf.parse(what_ifs),
        close,
        overtakings,
        remarks,
        compared=not strategies,
    )


def _print_steps(
    predictions: list[Prediction],
    best: Prediction,
    allow: tuple[str, ...],
    workload: Workload,
    cluster: Cluster,
    what_if: WhatIf,
    close: Mapping[int, list[Prediction]],
    overtakings: Sequence[Crossover],
    remarks: Sequence[str],
    *,
    compared: bool,
) -> None:
    """Print the answer, ``remarks`` and the table. ``compared``: the user named no strategies."""
    largest = [prediction for prediction in predictions if prediction.workers == best.workers]
    console = output.console()
    slower = [prediction for prediction in largest if prediction is not best]
    second = f" ({slower[0].strategy}: {slower[0].step_ms:.1f})" if slower else ""
    how = ", ".join(filter(None, [best.strategy, what_if.describe()]))
    answer = (
        f"{best.step_ms:.1f} ± {best.uncertainty_ms:.1f} ms a step of {workload.name} on "
        f"{counted(best.workers, 'worker')} of {counted(best.samples, 'sample')} each with {how}{second}: "
        f"{best.samples_per_s:.0f} samples/s, {best.efficiency:.0%} of their throughput without communication."
    )
    sentences = [answer, *remarks, *_training_change_notes(best, largest, allow)]
    if slower and any(
        prediction in close[best.workers] for prediction in slower if best in close[best.workers]
    ):
        sentences.append("Strategies marked ≈ are as fast as the fastest, within the errors.")
    if slower and compared:
        sentences.append(
            "Every strategy uses its default buckets; tuned buckets may change the ranking. Compare them with "
            "--strategy, as in ddp:bucket_cap_mb=100 or decoupled:bucket_cap_bytes=100000000."
        )
    for sentence in sentences:
        console.print(one_line(sentence, LONGEST))
    console.print(_table(predictions, workload, close))
    for overtaking in overtakings:
        between = f"between {overtaking.below} and {overtaking.above} workers"
        overtakes = f"{overtaking.to} overtakes {overtaking.of} {between}."
        console.print(one_line(overtakes, LONGEST))
    notes = [f"{best.strategy}: {note}." for note in best.notes]
    notes += [
        f"Note: {prediction.strategy}: {ignored}." for prediction in largest for ignored in prediction.ignored
    ]
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
            "--measured and --what-if cannot be combined", got=what_if.describe(), expected="one of them"
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
            "--collective and --bytes must be used together, without a model",
            got=f"--collective {name or 'left out'}, --bytes {size_text or 'left out'}",
            expected="such as --collective all-gather --bytes 1GB",
        )
    timing = collective_time(cluster, name, parse_size_bytes(size_text, "--bytes"))
    if as_json:
        output.print_document("collective", {**timing.to_document(), "cluster": cluster.source})
        return
    by = timing.algorithm.replace("_", " ") + (f", {timing.protocol.upper()}" if timing.protocol else "")
    console = output.console()
    console.print(
        f"{_duration(timing.time_us)} ± {_duration(timing.uncertainty_us)} for {name} of "
        f"{format_bytes(timing.size_bytes)} over {timing.workers} workers on "
        f"{timing.hosts} host{'s' if timing.hosts > 1 else ''}, by {by}: {timing.tensor_gb_s:.3g} GB/s of the tensor, "
        f"{timing.bus_gb_s:.3g} GB/s on the bus."
    )
    console.print(f"No algorithm that reduces on the workers takes less than {_duration(timing.bound_us)}.")
    console.print(one_line(f"Links: {cluster.source}", LONGEST))


def _duration(time_us: float) -> str:
    return f"{time_us / 1e3:.4g} ms" if time_us >= 1000 else f"{time_us:.4g} us"


def _training_change_notes(best: Prediction, largest: list[Prediction], allow: tuple[str, ...]) -> list[str]:
    """Warnings about strategies that change what is trained: the best one, or faster ones not recommended."""
    if best.recommended(allow):
        sentences = [f"It changes what is trained: {best.changes_training}."] if best.changes_training else []
        return sentences + [
            f"{faster.strategy} would take {faster.step_ms:.1f} ms, but changes what is trained: "
            f"{faster.changes_training}. It is recommended only with --allow {' --allow '.join(faster.permissions)}."
            for faster in largest
            if not faster.recommended(allow) and faster.step_ms < best.step_ms
        ]
    return [
        f"This is not a recommendation: it changes what is trained ({best.changes_training}). Compare it with a "
        f"strategy that does not, or use --allow {' --allow '.join(best.permissions)}."
    ]


def _fastest_within_errors(predictions: list[Prediction], workload: Workload) -> list[Prediction]:
    """The fastest of ``predictions`` for one world size, and those that are as fast within their errors."""
    from headway.prediction.scaling import indistinct

    fastest = min(predictions, key=lambda prediction: prediction.step_ms, default=None)
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
    largest = max(prediction.workers for prediction in predictions)
    several = len({prediction.samples for prediction in predictions}) > 1
    at = f" with {counted(largest, 'worker')}" if several else ""
    sentences = [f"Computation takes {computation_ms:.1f} ms of each step{at}, the update included."]
    if several:
        sentences.append("Efficiency is relative to workers that compute the same batch alone.")
    if workload.times_error:
        sentences.append(
            f"All steps share an error of up to ± {workload.times_error * computation_ms:.1f} ms from the times of "
            "layers; it hardly affects the order of strategies."
        )
    if any(len(alike) > 1 for alike in close.values()):
        sentences.append("≈: as fast as the fastest with this many workers, within the errors.")
    permissions = {name for prediction in predictions for name in prediction.permissions}
    if permissions:
        from headway.plan.permissions import changes_in_words

        sentences.append(f"‡: this strategy changes what is trained ({changes_in_words(permissions)}).")
    if any(prediction.is_mean_iteration for prediction in predictions):
        sentences.append("Without synchronous steps, a step is a rank's mean iteration.")
    table.caption = " ".join(sentences)
    return table


def _world_sizes(text: str | None, most: int) -> list[int]:
    from headway.simulator.what_if import MAX_WORKERS

    if text is None:
        sizes = [1]
        while sizes[-1] * 2 < most:
            sizes.append(sizes[-1] * 2)
        return [*sizes, most] if most > 1 else sizes
    parts = text.split(",")
    form = f"comma-separated numbers from 1 to {MAX_WORKERS}, at most {MOST_SIZES}"
    if len(parts) > MOST_SIZES or not all(
        part.strip().isdecimal() and len(part.strip()) < 6 for part in parts
    ):
        raise UserError("--workers cannot be read", got=repr(text), expected=form)
    sizes = sorted({int(part) for part in parts})
    if not 1 <= sizes[0] <= sizes[-1] <= MAX_WORKERS:
        raise UserError("--workers is out of range", got=repr(text), expected=form)
    return sizes
