"""Checks the contracts of plug-ins: call them in the tests of a package that adds a strategy, pass, codec or reader.

Each check raises AssertionError with a sentence on what is wrong. Install the package first, so that its entry points
are found (``pip install --editable .``). Only ``check_training`` starts processes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cluster import Cluster, Host
from headway.collectives.algorithms import ALL_GATHER, ALL_REDUCE
from headway.compression.codec import Codec, Exchange, Gradients, Reduced, Sent, Shape
from headway.compression.registry import codecs
from headway.errors import HeadwayError, TraceError, UnsupportedError
from headway.graph.computation import Computation, Item, Part, Point, Timeline
from headway.interop.readers.foreign import Document
from headway.interop.readers.formats import SNIFFED_BYTES, Reader, readers, recognised
from headway.job import Job
from headway.model import ModelSpec, ParameterSpec
from headway.passes.base import Pass, rewritten
from headway.passes.registry import passes
from headway.plan import Plan
from headway.plan.permissions import permissions
from headway.plugins import PluginFaultError
from headway.scheduling.buckets import BucketSchedule
from headway.simulator.simulate import simulate
from headway.strategies.base import Strategy, decided
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.plugin import proposal_of
from headway.strategies.registry import names, plugin_of
from headway.trace.events import Kind

if TYPE_CHECKING:
    import torch

__all__ = [
    "Simulation",
    "Trained",
    "check_codec",
    "check_exchanges",
    "check_feedback",
    "check_not_finite",
    "check_pass",
    "check_reader",
    "check_strategy",
    "check_training",
    "example_gradients",
    "example_job",
    "reduced",
    "train",
]

SHAPES: tuple[Shape, ...] = ((40, 30), (7,), (16, 3, 3, 3), (), (5, 0))
"""Parameter shapes of the bucket on which codecs are tested: matrices, a vector, a scalar, and an empty matrix."""

STEPS = 6
RANK_TIMEOUT_S = 300.0


@contextmanager
def _plugin_faults(who: str) -> Iterator[None]:
    """Turns exceptions of a plug-in into AssertionErrors, except its refusals (HeadwayError)."""
    try:
        yield
    except PluginFaultError as fault:
        raise AssertionError(f"{who}: {fault.reason}") from fault
    except (AssertionError, HeadwayError):
        raise
    except Exception as error:
        raise AssertionError(f"{who} raised {type(error).__name__}: {error}") from error


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


# Strategies.


def example_job(world_size: int = 4, layers: int = 6, gbps: float = 1.0) -> Job:
    """A recorded job: equal layers with a weight and a bias each, trained on ``world_size`` hosts with one rank each.

    ``gbps`` is the bandwidth of each host in both directions.
    """
    parameters, forward, backward, ready = [], [], [], []
    for number in range(layers):
        name = f"layer{number}"
        parameters += [
            ParameterSpec(name=f"{name}.weight", shape=(250, 400), dtype="float32", module=name),
            ParameterSpec(name=f"{name}.bias", shape=(250,), dtype="float32", module=name),
        ]
        forward += [Item(Point.USE, name), Item(Part.FORWARD, "", 1_000_000)]
    for number in reversed(range(layers)):
        layer_names = [f"layer{number}.bias", f"layer{number}.weight"]
        backward += [Item(Part.BACKWARD, "", 2_000_000), *(Item(Point.READY, name) for name in layer_names)]
        ready += layer_names
    items = (
        *forward,
        *backward,
        Item(Point.BACKWARD_END),
        Item(Point.STEP),
        Item(Part.OPTIMIZER, "", 500_000),
    )
    order = tuple(f"layer{number}" for number in range(layers))
    model = ModelSpec(parameters=tuple(parameters), forward_order=order, ready_order=tuple(ready))
    hosts = tuple(Host(name=f"h{r}", workers=1, up_gbps=gbps, down_gbps=gbps) for r in range(world_size))
    steps = Computation({0: tuple(Timeline(0, step, items) for step in range(4))})
    return Job((model,), world_size, Cluster(hosts=hosts), steps)


def check_strategy(strategy: Strategy, job: Job | None = None) -> None:
    """Checks that ``strategy`` decides deterministically, can be simulated, and survives a round trip to a plan file.

    Also checked: its bucket schedule holds every gradient once, no proposed plan is faster than its stated bound, and
    a strategy that changes the training needs a declared permission. The package must be installed. ``job`` defaults
    to ``example_job()``. Raises AssertionError.
    """
    job = example_job() if job is None else job
    who = strategy.describe()
    _check(bool(who), "describe() returns an empty text")
    _check(strategy.name in names(), f"{strategy.name} is not registered: install its package")
    plugin = plugin_of(strategy)
    _check(isinstance(strategy, plugin.policy), f"{strategy.name} is registered for another class")
    with _plugin_faults(who):
        schedule = decided(strategy, job)
    again = type(strategy).model_validate(strategy.model_dump(mode="json"))
    _check(again == strategy, f"{who}: options change in a round trip to JSON")
    _check(
        again.decide(job) == schedule, f"{who}: decide() is not pure: a second call returns another result"
    )
    _check(_through_a_file(strategy, job) == strategy, f"{who} changes in a round trip to a plan file")
    _check_permissions(strategy.changes_training, strategy.permissions, who)
    if isinstance(schedule, BucketSchedule):
        held = sorted(name for bucket in schedule.buckets for name in bucket.parameters)
        _check(held == sorted(job.model.by_name), f"{who}: the buckets must hold every gradient exactly once")
    with _plugin_faults(who):
        footprint = plugin.footprint(job, schedule, 0)
        proposal = proposal_of(plugin, job)
    _check(
        footprint.buffers_bytes >= 0 and footprint.state_bytes >= 0, f"{who}: footprint() has negative bytes"
    )
    _check(0 <= footprint.updated_share <= 1, f"{who}: updated_share must be between 0 and 1")
    step_ms = _replayed_ms(strategy, job)
    _check(math.isfinite(step_ms) and step_ms > 0, f"{who}: a step takes {step_ms} ms")
    _check(_replayed_ms(strategy, job) == step_ms, f"{who}: a second simulation gives another step time")
    for proposed in proposal.strategies:
        if math.isfinite(proposal.bound_ms) and not proposed.changes_training:
            replayed_ms = _replayed_ms(proposed, job)
            _check(
                replayed_ms >= proposal.bound_ms * (1 - 1e-6),
                f"{proposed.describe()} takes {replayed_ms:.3f} ms, less than its bound of {proposal.bound_ms:.3f} ms",
            )


def _replayed_ms(strategy: Strategy, job: Job) -> float:
    outcome = plugin_of(strategy).over_a_horizon(job, strategy)
    return simulate(job, strategy).step_ms if outcome is None else outcome.step_ms


def _through_a_file(strategy: Strategy, job: Job, *applied: Pass) -> Strategy | tuple[Pass, ...]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        plan = Plan.data_parallel(strategy, job.world_size, job.model).model_copy(update={"passes": applied})
        plan.save(path)
        loaded = Plan.load(path)
    return loaded.passes if applied else loaded.strategy


def _check_permissions(changes_training: str, needed: frozenset[str], who: str) -> None:
    _check(
        bool(changes_training) == bool(needed),
        f"{who}: exactly the plug-ins that change the training need a permission",
    )
    unknown = sorted(needed - set(permissions()))
    _check(not unknown, f"{who}: permission not declared: {', '.join(unknown)}")


# Training.


@dataclass(frozen=True)
class Trained:
    """A rank's final state: its parameters as one flat tuple, and a digest of their bits."""

    parameters: tuple[float, ...]
    digest: str


def train(rank: int, world_size: int, name: str, options: Mapping[str, Any], *, injected: bool) -> Trained:
    """Trains a small model for a few steps on this rank under the strategy ``name``. Needs a process group.

    ``injected`` wraps the model in ``DistributedDataParallel``, as an unmodified script does; otherwise it is passed to
    ``parallelize``.
    """
    from torch.nn.parallel import DistributedDataParallel

    from headway.integrations import plan_injection
    from headway.integrations.parallelize import finish, parallelize
    from headway.strategies.live.module_spec import model_spec
    from headway.strategies.registry import policy_named

    strategy = policy_named(name).model_validate(dict(options))
    module = _model()
    if injected:
        plan_injection.install(Plan.data_parallel(strategy, world_size, model_spec(module)))
    try:
        optimizer: torch.optim.Optimizer
        if injected:
            wrapped: Any = DistributedDataParallel(module)
            optimizer = _optimizer(wrapped)
        else:
            optimizer = _optimizer(module)
            wrapped = parallelize(module, optimizer, strategy)
        for step in range(STEPS):
            optimizer.zero_grad()
            _loss(wrapped, step, rank).backward()
            optimizer.step()
        finish(wrapped, timeout_s=60)
        return _trained(module)
    finally:
        if injected:
            plan_injection.uninstall()


def check_training(
    strategy: Strategy,
    *,
    world_size: int = 2,
    tolerance: float = 1e-5,
    ranks_equal: bool = True,
    reference: Callable[[int], Sequence[float]] | None = None,
    run: Callable[[int, str, dict[str, Any], bool], Sequence[Trained]] | None = None,
) -> None:
    """Trains a small model on ``world_size`` ranks under ``strategy``, with ``parallelize`` and as an unmodified script.

    Checks that the parameters are within ``tolerance`` of one process that trains on all batches, or of
    ``reference(world_size)`` for strategies that change the training, and that all ranks end with the same bits (unless
    ``ranks_equal`` is False). Ranks are local processes over Gloo. ``run(world_size, name, options, injected)`` replaces
    this launcher; it calls ``train`` on each rank and returns the results. Raises AssertionError.
    """
    options = strategy.model_dump(mode="json")
    expected = None
    if reference is not None or not strategy.changes_training:
        expected = (reference or _alone)(world_size)
    for injected in (False, True):
        who = f"{strategy.describe()}, {'injected' if injected else 'by parallelize'}"
        ranks = (run or _in_processes)(world_size, strategy.name, options, injected)
        _check(all(map(math.isfinite, ranks[0].parameters)), f"{who}: parameters are not finite")
        if ranks_equal:
            _check(len({trained.digest for trained in ranks}) == 1, f"{who}: ranks end with different bits")
        for rank, trained in enumerate(ranks if expected is not None else ()):
            assert expected is not None
            worst = max(abs(a - b) for a, b in zip(trained.parameters, expected, strict=True))
            _check(worst <= tolerance, f"{who}: rank {rank} differs from the reference by {worst:.3g}")


def _alone(world_size: int) -> Sequence[float]:
    """The reference: the parameters of one process that trains on the batches of all ranks."""
    module = _model()
    optimizer = _optimizer(module)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world_size):
            (_loss(module, step, rank) / world_size).backward()
        optimizer.step()
    return _trained(module).parameters


def _model() -> torch.nn.Module:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def _optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
    import torch

    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def _loss(module: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    import torch

    drawn = torch.randn(8, 12, generator=torch.Generator().manual_seed(1000 * step + rank))
    loss: torch.Tensor = (module(drawn) - 1).square().mean()
    return loss


def _trained(module: torch.nn.Module) -> Trained:
    import torch

    flat = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
    return Trained(tuple(flat.tolist()), hashlib.sha256(flat.numpy().tobytes()).hexdigest())


def _in_processes(world_size: int, name: str, options: dict[str, Any], injected: bool) -> list[Trained]:
    arguments = json.dumps([name, options, injected])
    with tempfile.TemporaryDirectory() as folder, plugin_variables(name, options) as variables:
        command = [
            sys.executable,
            "-P",
            "-c",
            "from headway.ext.testing import _rank; _rank()",
            folder,
            arguments,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables, "WORLD_SIZE": str(world_size)}
        ranks = [
            subprocess.Popen(
                command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            for rank in range(world_size)
        ]  # fmt: skip
        try:
            outputs = [rank.communicate(timeout=RANK_TIMEOUT_S)[0] for rank in ranks]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"ranks under {name} did not finish within {RANK_TIMEOUT_S:g} s") from None
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        for number, (rank, output) in enumerate(zip(ranks, outputs, strict=True)):
            _check(
                rank.returncode == 0, f"rank {number} under {name} failed:\n{output.decode(errors='replace')}"
            )
        return [
            Trained(*json.loads((Path(folder) / f"{number}").read_text())) for number in range(world_size)
        ]


def plugin_variables(name: str, options: Mapping[str, Any]) -> Any:
    """The launcher's context for a strategy: a context manager that gives environment variables for its ranks."""
    from headway.strategies.registry import plugin_named, policy_named

    return plugin_named(name).launched_with(policy_named(name).model_validate(dict(options)))


def _rank() -> None:
    """The process of one rank of ``check_training``."""
    import torch.distributed as dist

    folder, arguments = sys.argv[1:]
    name, options, injected = json.loads(arguments)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    done = train(rank, world_size, name, options, injected=injected)
    (Path(folder) / f"{rank}").write_text(json.dumps([done.parameters, done.digest]))
    dist.barrier()
    dist.destroy_process_group()


# Passes.


def check_pass(
    changed: Pass,
    job: Job | None = None,
    *,
    same_numbers: bool = True,
    module: Callable[[], torch.nn.Module] | None = None,
) -> None:
    """Checks that the pass ``changed`` rewrites deterministically, survives a plan file, and trains the same numbers.

    A pass that refuses ``job`` with UnsupportedError (for example because it was not measured) is not simulated. With
    ``same_numbers=False``, or if the pass changes the training, only finite parameters are checked. ``module`` builds
    the model, from 12 inputs to any output and equal at each call, for passes that need certain modules. The package
    must be installed. Raises AssertionError.
    """
    job = example_job() if job is None else job
    who = changed.describe()
    _check(bool(who), "describe() says nothing")
    _check(
        passes().get(changed.name) is type(changed), f"{changed.name} is not registered: install its package"
    )
    loaded = _through_a_file(DistributedDataParallelStrategy(), job, changed)
    _check(loaded == (changed,), f"{who} changes in a round trip to a plan file")
    _check_permissions(changed.changes_training, frozenset((changed.permission,)) - {""}, who)
    ddp = DistributedDataParallelStrategy()
    try:
        with _plugin_faults(who):
            once, twice = rewritten(job, (changed,)), rewritten(job, (changed,))
    except UnsupportedError:
        pass
    else:
        _check(once.world_size == job.world_size, f"{who}: rewrite() changes the number of ranks")
        _check(simulate(once, ddp).step_ms == simulate(twice, ddp).step_ms, f"{who}: rewrite() is not pure")
    for proposed in type(changed).proposed(job):
        _check(isinstance(proposed, type(changed)), f"{who}: proposed() gives {proposed!r}")
    with _plugin_faults(who):
        plain, under = (
            _pass_trained(applied, _model() if module is None else module()) for applied in (None, changed)
        )
    _check(all(map(math.isfinite, under)), f"{who}: parameters are not finite")
    if same_numbers and not changed.changes_training:
        worst = max(abs(a - b) for a, b in zip(plain, under, strict=True))
        _check(worst <= 1e-5, f"{who}: parameters differ from training without it by {worst:.3g}")


def _pass_trained(changed: Pass | None, module: torch.nn.Module) -> Sequence[float]:
    from headway.passes.other_forward import apply_all

    optimizer = _optimizer(module)
    run = module
    if changed is not None:
        changed.prepare()
        run = apply_all((changed,), module, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(run, step, 0).backward()
        optimizer.step()
    return _trained(module).parameters


# Codecs.


def reduced(codec: Codec, ranks: Sequence[Gradients]) -> tuple[list[Reduced], list[Exchange]]:
    """Runs ``codec.reduce`` for all ranks in this process, in lockstep; returns each rank's result and the collectives.

    Raises AssertionError if ``reduce`` is not a generator of Sent that returns Reduced.
    """
    who = codec.describe()
    reductions = [codec.reduce(gradients) for gradients in ranks]
    for reduction in reductions:
        is_generator = isinstance(reduction, Generator)
        _check(is_generator, f"{who}: reduce() must be a generator that yields Sent")
    sent: list[Sent] = []
    for rank, reduction in enumerate(reductions):
        try:
            sent.append(next(reduction))
        except StopIteration:
            raise AssertionError(f"{who}: rank {rank} requests no collective") from None
    exchanges: list[Exchange] = []
    done: list[Reduced] = []
    while not done:
        for rank, item in enumerate(sent):
            _check(isinstance(item, Sent), f"{who}: rank {rank} yields {type(item).__name__}, expected Sent")
        results, size_bytes = _exchanged(sent)
        exchanges.append(Exchange(sent[0].kind, size_bytes))
        sent = []
        for reduction, result in zip(reductions, results, strict=True):
            try:
                sent.append(reduction.send(result))
            except StopIteration as stop:
                done.append(stop.value)
    _check(not sent, f"{who}: ranks request different numbers of collectives")
    for rank, returned in enumerate(done):
        _check(
            isinstance(returned, Reduced),
            f"{who}: reduce() returns {type(returned).__name__} on rank {rank}, expected Reduced",
        )
    return done, exchanges


def _exchanged(sent: Sequence[Sent]) -> tuple[list[torch.Tensor], int]:
    import torch

    operands = [item.operand for item in sent]
    sent_bytes = operands[0].numel() * operands[0].element_size()
    _check(len({item.kind for item in sent}) == 1, "ranks request different collectives")
    if sent[0].kind == ALL_REDUCE:
        total = operands[0].clone()
        for operand in operands[1:]:
            total += operand
        return [total.clone() for _ in operands], sent_bytes
    if sent[0].kind == ALL_GATHER:
        rows = torch.stack([item.view(-1) for item in operands])
        return [rows.clone() for _ in operands], sent_bytes * len(operands)
    return [torch.stack([item[rank] for item in operands]) for rank in range(len(operands))], sent_bytes


class Simulation:
    """Simulates training steps of all ranks with error feedback. ``shapes`` are those of the bucket's parameters."""

    def __init__(self, codec: Codec, shapes: Sequence[Shape], world_size: int, dtype: torch.dtype) -> None:
        import torch

        self.codec, self.shapes, self.world_size = codec, shapes, world_size
        numel = sum(map(math.prod, shapes))
        self.kept = [torch.zeros(numel, dtype=dtype) for _ in range(world_size)]
        self.memory: list[dict[int, torch.Tensor]] = [{} for _ in range(world_size)]
        self.keys = range(len(shapes))

    def step(self, flats: Sequence[torch.Tensor], keys: Sequence[int] | None = None) -> torch.Tensor:
        """Runs one step on ``flats``, one per rank, and returns the mean that all ranks receive."""
        import torch

        ranks = [
            Gradients(
                flat + self.kept[rank], self.shapes, keys or self.keys, rank, self.world_size, self.memory[rank]
            )
            for rank, flat in enumerate(flats)
        ]  # fmt: skip
        done, _ = reduced(self.codec, ranks)
        if self.codec.feeds_back:
            self.kept = [result.kept.clone() for result in done]
        equal = all(torch.equal(result.mean, done[0].mean) for result in done)
        _check(equal, f"{self.codec.describe()}: ranks end with different bits")
        return done[0].mean


def example_gradients(world_size: int, seed: int = 0, dtype: str = "float32") -> list[Gradients]:
    """Random gradients of a bucket with parameters of ``SHAPES``, one per rank."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    numel = sum(map(math.prod, SHAPES))
    return [
        Gradients(
            torch.randn(numel, generator=generator, dtype=getattr(torch, dtype)), SHAPES, range(len(SHAPES)), rank,
            world_size,
        )
        for rank in range(world_size)
    ]  # fmt: skip


def check_codec(codec: Codec, world_sizes: Sequence[int] = (1, 2, 3, 4), *, rounding: float = 0.0) -> None:
    """Runs all checks of ``codec`` for ``world_sizes``. The package must be installed; ``rounding``: ``check_feedback``.

    Also checks registration, plan file, permission, and that a simulated step has a finite time. Raises AssertionError.
    """
    who = codec.describe()
    _check(bool(who), "describe() returns an empty text")
    _check(codecs().get(codec.name) is type(codec), f"{codec.name} is not registered: install its package")
    job = example_job()
    strategy = DistributedDataParallelStrategy(wire=(codec,))
    _check(_through_a_file(strategy, job) == strategy, f"{who} changes in a round trip to a plan file")
    _check_permissions(codec.loses, frozenset((codec.permission,)) - {""}, who)
    for world_size in world_sizes:
        for dtype in ("float32", "float64"):
            check_exchanges(codec, world_size, dtype)
        if codec.feeds_back:
            check_feedback(codec, world_size, rounding=rounding)
    check_not_finite(codec)
    step_ms = simulate(job, strategy).step_ms
    _check(math.isfinite(step_ms) and step_ms > 0, f"{who}: a step takes {step_ms} ms")


def check_exchanges(codec: Codec, world_size: int, dtype: str = "float32") -> None:
    """Checks that ``exchanges`` predicts what is sent, all ranks get the same bits, and inputs are not modified."""
    import torch

    who = f"{codec.describe()}, {world_size} ranks, {dtype}"
    ranks = example_gradients(world_size, dtype=dtype)
    before = [rank.flat.clone() for rank in ranks]
    done, exchanges = reduced(codec, ranks)
    expected = tuple(codec.exchanges(SHAPES, dtype, world_size))
    _check(tuple(exchanges) == expected, f"{who}: sent {exchanges}, but exchanges() predicts {expected}")
    _check(all(bool(result.mean.isfinite().all()) for result in done), f"{who}: the mean is not finite")
    _check(
        all(torch.equal(result.mean, done[0].mean) for result in done),
        f"{who}: ranks end with different bits",
    )
    unchanged = all(torch.equal(result.flat, flat) for result, flat in zip(ranks, before, strict=True))
    _check(unchanged, f"{who}: reduce() modifies its input gradients")
    _check(done[0].mean.shape == before[0].shape, f"{who}: the mean has a different shape than the gradients")
    _check(done[0].mean.dtype == before[0].dtype, f"{who}: the mean has a different dtype than the gradients")
    _check(
        all((result.kept.numel() > 0) == codec.feeds_back for result in done),
        f"{who}: kept must be non-empty exactly if feeds_back is set",
    )
    costs = codec.default_us(2**20, world_size)
    _check(
        len(costs) > len(exchanges), f"{who}: default_us() must return one more time than there are exchanges"
    )
    _check(min(costs) > 0, f"{who}: default_us() must return positive times")


def check_feedback(codec: Codec, world_size: int, *, rounding: float = 0.0, steps: int = 20) -> None:
    """Checks that sent and kept values add up to the gradients over ``steps`` steps.

    Low-precision sums may lose up to ``rounding`` per step and rank.
    """
    import torch

    simulation = Simulation(codec, SHAPES, world_size, torch.float64)
    sent = total = torch.zeros(sum(map(math.prod, SHAPES)), dtype=torch.float64)
    for step in range(steps):
        flats = [example_gradient.flat for example_gradient in example_gradients(world_size, step, "float64")]
        total = total + torch.stack(flats).mean(0)
        sent = sent + simulation.step(flats)
        off = float((sent + torch.stack(simulation.kept).mean(0) - total).abs().max())
        most = max(1e-10, (step + 1) * world_size * rounding)
        _check(
            off <= most,
            f"{codec.describe()}: {off:.3g} is neither sent nor kept after {step + 1} steps. If rounding is the reason, "
            f"as in float16 sums, pass check_codec(..., rounding=) the tolerated loss per step and rank: here "
            f"{off / (step + 1) / world_size:.1g}",
        )


def check_not_finite(codec: Codec, world_size: int = 3) -> None:
    """Checks that an infinity or NaN on one rank shows in the mean on all ranks, so that a GradScaler skips the step."""
    for harm in (math.inf, -math.inf, math.nan):
        ranks = example_gradients(world_size)
        ranks[1].flat[5] = harm
        done, _ = reduced(codec, ranks)
        seen = all(not bool(result.mean.isfinite().all()) for result in done)
        _check(seen, f"{codec.describe()}: {harm} on one rank does not show in the mean")


# Readers.


def check_reader(reader: Reader, name: str, data: bytes, *, damages: int = 100) -> None:
    """``reader``, of an installed package, reads the document ``name`` of ``data``, and refuses damaged ones.

    The document is cut, or bytes of it are changed, ``damages`` times, in the same way in each run.
    """
    who = f"the reader {reader.name}"
    _check(readers().get(reader.name) is reader, f"{who} is not registered: install its package")
    chosen = recognised(name, data[:SNIFFED_BYTES])
    _check(chosen is reader, f"{name} is recognised by {chosen.name if chosen else 'no reader'}")
    with _plugin_faults(who):
        ranks = reader.read(Document(name, data)).ranks
    _check(bool(ranks), f"{who} finds no rank in {name}")
    for rank in ranks:
        steps = rank.events.of_kind(Kind.STEP)
        _check(len(steps) > 0 or rank.role == "server", f"{who}: a rank of {name} has no step")
        _check(bool((rank.events.duration_ns >= 0).all()), f"{who}: an event ends before it begins")
    draw = random.Random(0)
    for number in range(damages):
        damaged = bytearray(data[: draw.randrange(len(data) + 1)] if number % 2 else data)
        for _ in range(min(len(damaged), draw.choice((0, 1, 5)))):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        for lenient in (False, True):
            with _plugin_faults(f"{who}, of a damaged document"), suppress(TraceError):
                reader.read(Document(name, bytes(damaged), "", lenient))
