"""Measures what a pass does to a recorded job, for ``headway measure``.

Most passes are measured with the job's own command, which runs four times: in turn as it is, and under stock DDP with
the pass. The effect on a part of a step is the ratio of medians over ranks and steps (means for input), without waits;
the memory is that of the last run. Implementations of the optimizer are measured without the command, by updating
tensors of the model's shapes and types in this process, with as many threads as torch has here (OMP_NUM_THREADS).
"""

from __future__ import annotations

import inspect
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from headway import torch_private
from headway.errors import HeadwayError, LaunchError, TraceError, UnsupportedError, UserError
from headway.graph.computation import Part
from headway.graph.recorded import timelines_of
from headway.job import Job, MeasuredEffect
from headway.memory.pass_watch import Allocations
from headway.model import ModelSpec
from headway.passes.base import lies_in
from headway.passes.compile import Compile
from headway.passes.input_workers import InputWorkers
from headway.passes.measured import MeasuredModules, MeasuredPass
from headway.passes.optimizer import IMPLEMENTATIONS, OptimizerImplementation, effect_name, switch
from headway.passes.precision import Precision
from headway.passes.registry import passes
from headway.plan import Plan
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.trace.folder import load_trace
from headway.trace.format import Trace

RUNS = 2  # of the command, as it is and with the pass each
UPDATES = 9  # timed updates of each implementation of an optimizer
LEAST_NS = 1_000  # shorter parts of a step have no meaningful factor
MOMENTUM = 0.9
DEFAULT_WORKERS = 2
Run = Callable[[Sequence[str]], int]
"""Runs a command to its end, and returns its exit status."""


def measure(name: str, path: Path, words: Sequence[str], command: Sequence[str]) -> dict[str, MeasuredEffect]:
    """Measure the pass ``name`` for the trace at ``path``, save its effects there, and return them by name.

    ``words`` are options of the pass (see ``pass_of``). ``command`` is the recorded command; the optimizer needs none.
    Raises UserError for wrong words, LaunchError if a run fails, and TraceError if it trains another model.
    """
    from headway.replayer.replayer import Replayer

    if name != OptimizerImplementation.name:
        if not command:
            _kind(name)  # a wrong name is the first problem
        return _measure_runs(path, (name, *words), command, pass_of)
    if words or command:
        raise UserError(
            "the optimizer is measured without options and without a command", got=" ".join((*words, *command)),
            fix=f"Run: headway measure {name} {path}.",
        )  # fmt: skip
    trace = load_trace(path)
    device = torch_private.compute_device()
    effects = measured_optimizers(Replayer(trace).job, device)
    _save(trace, effects, device)
    return effects


def in_words(effects: dict[str, MeasuredEffect]) -> list[str]:
    """One line per effect: its factor of time, and the memory that an update holds."""
    return [
        f"{name}: {effect.factor:.3g} times the time"
        + (f", {effect.held_bytes} additional bytes" if effect.held_bytes else "")
        for name, effect in effects.items()
    ]


def pass_of(trace: Trace, words: Sequence[str]) -> MeasuredPass:
    """The pass named by the first of ``words``, with the options in the others, such as ``block=64``.

    Other words are names of modules, for passes that take some. Defaults: bfloat16 for ``precision``, two workers for
    ``input``, and the repeated modules for ``compile``. Raises UserError for wrong words.
    """
    kind = _kind(words[0] if words else "")
    options: dict[str, object] = {}
    modules: list[str] = []
    for word in words[1:]:
        name, is_option, text = word.partition("=")
        if is_option:
            options[name] = _value(text)
        elif issubclass(kind, MeasuredModules):
            modules.append(word)
        else:
            raise UserError(
                f"the pass {words[0]} needs options with values", got=word, expected="OPTION=VALUE"
            )
    if modules:
        options["modules"] = modules
    if kind is Precision:
        options.setdefault("dtype", "bfloat16")
    elif kind is InputWorkers:
        options.setdefault("workers", DEFAULT_WORKERS)
    elif kind is Compile and "modules" not in options:
        options["modules"] = repeated_modules(trace.model)
    return kind.model_validate(options)


def _kind(name: str) -> type[MeasuredPass]:
    kinds = {name: kind for name, kind in passes().items() if issubclass(kind, MeasuredPass)}
    if name not in kinds:
        raise UserError(
            "no pass of this name can be measured", got=name or "nothing",
            expected=" or ".join([OptimizerImplementation.name, *kinds]),
        )  # fmt: skip
    return kinds[name]


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:  # a word without quotes
        return text


def repeated_modules(model: ModelSpec) -> tuple[str, ...]:
    """The numbered modules of one parent, such as a transformer's blocks: of all parents, those with most parameters.

    Raises UserError if there are none.
    """
    paths = list(dict.fromkeys(parameter.module for parameter in model.parameters))
    siblings: dict[str, dict[str, None]] = {}
    for path in paths:
        names = path.split(".")
        for depth, name in enumerate(names):
            if name.isdecimal():
                siblings.setdefault(".".join(names[:depth]), {})[".".join(names[: depth + 1])] = None

    def size_bytes(modules: dict[str, None]) -> int:
        return sum(
            parameter.size_bytes
            for parameter in model.parameters
            if any(lies_in(parameter.module, module) for module in modules)
        )

    several = [modules for modules in siblings.values() if len(modules) > 1]
    if not several:
        raise UserError(
            "the model has no numbered modules to compile", got=", ".join(paths[:8]),
            fix="Name the modules to compile: headway measure compile TRACE MODULE ... -- COMMAND.",
        )  # fmt: skip
    largest = max(several, key=size_bytes)
    return tuple(largest)


def measured_effects(
    trace: Trace, changed: MeasuredPass, command: Sequence[str], run: Run, rounds: int = RUNS
) -> dict[str, MeasuredEffect]:
    """Run ``command``, which starts the job of ``trace``, with and without ``changed``; returns its effects by name.

    Raises LaunchError if a run fails, and TraceError if it trains another model or on another number of ranks.
    """
    plan = Plan.data_parallel(DistributedDataParallelStrategy(), trace.world_size, trace.model)
    plan = plan.model_copy(update={"passes": (changed,), "changes_training": changed.changes_training})
    headway = (sys.executable, "-P", "-m", "headway")
    with tempfile.TemporaryDirectory(prefix=f"headway-{changed.name}-") as folder:
        path = Path(folder) / "plan.yaml"
        plan.save(path)
        under_plan = (*headway, "run", "--plan", str(path), "--", *command)
        stock: list[Trace] = []
        with_pass: list[Trace] = []
        for number in range(rounds):
            for traces, job_command in ((stock, tuple(command)), (with_pass, under_plan)):
                out = Path(folder) / f"{number}-{len(stock)}-{len(with_pass)}"
                record = (*headway, "record", "--no-measuring")
                traces.append(_recorded(trace, out, record, job_command, run))
        return effects_between(stock, with_pass, changed)


def effects_between(
    stock: Sequence[Trace], with_pass: Sequence[Trace], changed: MeasuredPass
) -> dict[str, MeasuredEffect]:
    """The effects of ``changed`` by name, from recordings of the job without (``stock``) and with it."""
    memory = with_pass[-1].model.pass_memory
    return {
        changed.effect_name(part): MeasuredEffect(
            _factor(stock, with_pass, part), memory=memory if part == changed.parts[0] else None
        )
        for part in changed.parts
    }


def _recorded(trace: Trace, out: Path, record: Sequence[str], command: Sequence[str], run: Run) -> Trace:
    steps = f"{trace.steps[0]}:{trace.steps[-1] + 1}"
    status = run((*record, "-o", str(out), "--steps", steps, "--", *command))
    if status != 0:
        raise LaunchError(
            "a measured run failed", got=f"exit status {status}", expected="0", fix="See its output.",
        )  # fmt: skip
    recording = load_trace(out)
    for what, got, expected in (
        ("model", recording.model.fingerprint, trace.model.fingerprint),
        ("number of ranks", recording.world_size, trace.world_size),
    ):
        if got != expected:
            raise TraceError(
                f"the command and the recording differ in the {what}", got=str(got), expected=str(expected),
                fix="Pass the command that was recorded.",
            )  # fmt: skip
    return recording


def _factor(stock: Iterable[Trace], with_pass: Iterable[Trace], part: str) -> float:
    before_ns = _typical_ns(stock, part)
    return max(1.0, _typical_ns(with_pass, part)) / before_ns if before_ns >= LEAST_NS else 1.0


def _typical_ns(traces: Iterable[Trace], part: str) -> float:
    times_ns = [
        sum(item.duration_ns for item in timeline.items if item.kind == part)
        for trace in traces
        for steps in timelines_of(trace).values()
        for timeline in steps
    ]
    # Batches of several workers arrive in bursts: one long wait, and then none for a while.
    return statistics.mean(times_ns) if part == Part.INPUT else statistics.median(times_ns)


def _run(command: Sequence[str]) -> int:
    return subprocess.run(command, check=False, stdout=sys.stderr).returncode


def measured_optimizers(job: Job, device: torch.device, rounds: int = UPDATES) -> dict[str, MeasuredEffect]:
    """The effects of all of torch's implementations of the optimizer of ``job`` on ``device``, by name.

    The factor of time is the median over ``rounds`` of the ratio to torch's default implementation. Raises
    UnsupportedError for pipelines, for several classes of optimizers, and for optimizers that are not torch's own.
    """
    names = job.optimizers.names
    if len(job.stages) > 1 or len(names) != 1 or not _is_torchs(names[0]):
        raise UnsupportedError(
            "this job's optimizer cannot be measured", got=", ".join(names) or "none recorded",
            expected="one class of torch.optim with other implementations, and a job without pipeline",
        )  # fmt: skip
    if why := job.refusals.get(OptimizerImplementation.name):
        raise UnsupportedError(
            "the script already chooses an implementation of its optimizer", got=why,
            expected="torch's default", fix="Remove the option, and record the job again.",
        )  # fmt: skip
    effects = {}
    for implementation in IMPLEMENTATIONS:
        parameters = _parameters(job.model, device)
        stock, switched = (_optimizer(names[0], parameters, job.model) for _ in range(2))
        try:
            switch(switched, implementation)
        except UnsupportedError:  # torch has none, or none for this device
            continue
        _held_bytes(stock)
        held_bytes = _held_bytes(switched)
        factor = statistics.median(_ratio(switched, stock, device) for _ in range(rounds))
        effects[effect_name(implementation, names[0])] = MeasuredEffect(factor, held_bytes)
    return effects


def _is_torchs(name: str) -> bool:
    kind = getattr(torch.optim, name, None)
    return isinstance(kind, type) and "foreach" in inspect.signature(kind).parameters


def _parameters(model: ModelSpec, device: torch.device) -> list[nn.Parameter]:
    """Parameters of the model's shapes and types, with gradients."""
    parameters = []
    for parameter in model.parameters:
        dtype = getattr(torch, parameter.dtype)
        parameters.append(nn.Parameter(torch.full(parameter.shape, 0.5, device=device, dtype=dtype)))
        parameters[-1].grad = torch.full_like(parameters[-1], 1e-3)
    return parameters


def _optimizer(name: str, parameters: list[nn.Parameter], model: ModelSpec) -> torch.optim.Optimizer:
    """An optimizer of this class. The recorded size of its state shows whether SGD and RMSprop have momentum."""
    make: Any = getattr(torch.optim, name)
    least_bytes = {"SGD": 0, "RMSprop": model.size_bytes}.get(name)
    momentum = least_bytes is not None and model.optimizer_state_bytes > 1.5 * least_bytes
    optimizer: torch.optim.Optimizer = make(
        parameters, lr=1e-3, **({"momentum": MOMENTUM} if momentum else {})
    )
    return optimizer


def _held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The peak of an update's temporary memory; the first update, which creates state, does not count."""
    optimizer.step()
    watch = Allocations()
    with watch:
        optimizer.step()
    return watch.peak_bytes()


def _ratio(switched: torch.optim.Optimizer, stock: torch.optim.Optimizer, device: torch.device) -> float:
    stock_ns = _step_ns(stock, device)
    return _step_ns(switched, device) / stock_ns


def _step_ns(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    _wait_for(device)
    begin_ns = time.perf_counter_ns()
    optimizer.step()
    _wait_for(device)
    return max(1, time.perf_counter_ns() - begin_ns)


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


PassFor = Callable[[Trace, tuple[str, ...]], MeasuredPass]


def measure_arguments(arguments: Sequence[str], pass_for: PassFor = pass_of) -> int:
    """Measure as a command line's ``arguments`` say, TRACE [WORD ...] -- COMMAND; returns its exit status.

    ``pass_for`` makes the pass from the trace and the words, and raises UserError for unknown words.
    """
    cut = list(arguments).index("--") if "--" in arguments else len(arguments)
    words, command = arguments[:cut], arguments[cut + 1 :]
    if {"-h", "--help"} & set(words):
        print("TRACE [WORD ...] -- COMMAND")
        return 0
    try:
        if options := [word for word in words if word.startswith("-")]:
            raise UserError("unknown options", got=" ".join(options), expected="--help")
        if not words:
            raise UserError("no trace to measure for", expected="TRACE ... -- COMMAND")
        print("\n".join(in_words(_measure_runs(Path(words[0]), words[1:], command, pass_for))))
    except HeadwayError as failure:
        print(f"headway: {failure} See --help.", file=sys.stderr)
        return 2 if isinstance(failure, UserError) else 1
    except KeyboardInterrupt:
        print("headway: interrupted", file=sys.stderr)
        return 130
    return 0


def _measure_runs(
    path: Path, words: Sequence[str], command: Sequence[str], pass_for: PassFor
) -> dict[str, MeasuredEffect]:
    if not command:
        raise UserError(
            "no command to measure", expected="-- followed by the command that was recorded",
            fix="For example: -- torchrun train.py",
        )  # fmt: skip
    trace = load_trace(path)
    try:
        changed = pass_for(trace, tuple(words))
    except ValidationError as failure:
        message = failure.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise UserError(message, got=" ".join(words)) from None
    changed.check_model(trace.model)  # before the runs, which take time
    effects = measured_effects(trace, changed, command, _run)
    _save(trace, effects, torch_private.compute_device())
    return effects


def _save(trace: Trace, effects: dict[str, MeasuredEffect], device: torch.device) -> None:
    from headway.replayer.measured_effects import save_effects

    save_effects(trace, effects, str(device))
