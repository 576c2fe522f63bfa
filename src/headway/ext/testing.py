"""Checks for the tests of a package that brings a strategy, a pass, a codec or a reader.

Headway's own tests use them too. Each raises AssertionError with a sentence that says what is wrong. The package has to
be installed, so that its entry points are found (``pip install --editable .``). Only ``check_training`` starts
processes.
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
"""Of the parameters of a bucket that codecs are tried on: matrices, a vector, a scalar, and one without elements."""

STEPS = 6
RANK_TIMEOUT_S = 300.0


@contextmanager
def _said(who: str) -> Iterator[None]:
    """Raise AssertionError for what a plug-in raises in here, but for its refusals."""
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
    """A job of equal layers of a weight and a bias each, which ``world_size`` hosts of one rank each train."""
    parameters, forward, backward, ready = [], [], [], []
    for number in range(layers):
        name = f"layer{number}"
        parameters += [
            ParameterSpec(name=f"{name}.weight", shape=(250, 400), dtype="float32", module=name),
            ParameterSpec(name=f"{name}.bias", shape=(250,), dtype="float32", module=name),
        ]
        forward += [Item(Point.USE, name), Item(Part.FORWARD, "", 1_000_000)]
    for number in reversed(range(layers)):
        own = [f"layer{number}.bias", f"layer{number}.weight"]
        backward += [Item(Part.BACKWARD, "", 2_000_000), *(Item(Point.READY, name) for name in own)]
        ready += own
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
    """``strategy``, of an installed package, decides purely, is replayed, and comes back from a plan file the same.

    A schedule of buckets has every gradient once. No proposed plan is replayed in less than the bound that it comes
    with, and what changes the training needs a permission that there is.
    """
    job = example_job() if job is None else job
    who = strategy.describe()
    _check(bool(who), "describe() says nothing")
    _check(strategy.name in names(), f"{strategy.name} is not registered: install the package that brings it")
    plugin = plugin_of(strategy)
    _check(isinstance(strategy, plugin.policy), f"{strategy.name} is the name of another strategy")
    with _said(who):
        schedule = decided(strategy, job)
    again = type(strategy).model_validate(strategy.model_dump(mode="json"))
    _check(again == strategy, f"{who}: its options do not come back from their JSON")
    _check(again.decide(job) == schedule, f"{who}: decide is not pure, it decides otherwise the second time")
    _check(_through_a_file(strategy, job) == strategy, f"{who} does not come back from a plan file")
    _check_permissions(strategy.changes_training, strategy.permissions, who)
    if isinstance(schedule, BucketSchedule):
        held = sorted(name for bucket in schedule.buckets for name in bucket.parameters)
        _check(held == sorted(job.model.by_name), f"{who}: buckets do not hold every gradient once")
    with _said(who):
        footprint = plugin.footprint(job, schedule, 0)
        made = proposal_of(plugin, job)
    _check(footprint.buffers_bytes >= 0 and footprint.state_bytes >= 0, f"{who} holds less than nothing")
    _check(0 <= footprint.updated_share <= 1, f"{who}: updated_share is a share")
    step_ms = _replayed_ms(strategy, job)
    _check(math.isfinite(step_ms) and step_ms > 0, f"{who}: a step takes {step_ms} ms")
    _check(_replayed_ms(strategy, job) == step_ms, f"{who}: a second replay takes another time")
    for proposed in made.strategies:
        if math.isfinite(made.bound_ms) and not proposed.changes_training:
            replayed_ms = _replayed_ms(proposed, job)
            _check(
                replayed_ms >= made.bound_ms * (1 - 1e-6),
                f"{proposed.describe()} takes {replayed_ms:.3f} ms, less than its bound of {made.bound_ms:.3f} ms",
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
        f"{who}: what changes the training needs a permission, and nothing else does",
    )
    unknown = sorted(needed - set(permissions()))
    _check(not unknown, f"{who}: nothing declares the permission {', '.join(unknown)}")


# Training.


@dataclass(frozen=True)
class Trained:
    """What a rank ends with: its parameters behind each other, and a digest of their bits."""

    parameters: tuple[float, ...]
    digest: str


def train(rank: int, world_size: int, name: str, options: Mapping[str, Any], *, injected: bool) -> Trained:
    """Train a small model for some steps on this rank, whose process group is there, under a strategy.

    With ``injected`` the model is wrapped in ``DistributedDataParallel`` as a script does that knows no plan.
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
    """``world_size`` ranks train a small model under ``strategy``, by ``parallelize`` and in an unmodified script.

    Both give the parameters of one process that trains on all batches, within ``tolerance``; or those that
    ``reference`` gives for a number of ranks, where the strategy changes what is trained. All ranks end with the same
    bits, unless ``ranks_equal`` is False. Ranks are processes of this machine, over Gloo; ``run`` starts them in
    another way: it gets the number of ranks and what ``train`` gets, and returns what that returns on each rank.
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
            _check(len({one.digest for one in ranks}) == 1, f"{who}: ranks end with different bits")
        for rank, one in enumerate(ranks if expected is not None else ()):
            assert expected is not None
            worst = max(abs(a - b) for a, b in zip(one.parameters, expected, strict=True))
            _check(worst <= tolerance, f"{who}: rank {rank} is off the reference by {worst:.3g}")


def _alone(world_size: int) -> Sequence[float]:
    """The parameters of one process that trains on the batches of all ranks."""
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
    said = json.dumps([name, options, injected])
    with tempfile.TemporaryDirectory() as folder, plugin_variables(name, options) as variables:
        command = [sys.executable, "-P", "-c", "from headway.ext.testing import _rank; _rank()", folder, said]
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
            raise AssertionError(f"ranks under {name} do not end within {RANK_TIMEOUT_S:g} s") from None
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        for number, (rank, output) in enumerate(zip(ranks, outputs, strict=True)):
            _check(
                rank.returncode == 0, f"rank {number} under {name} ended:\n{output.decode(errors='replace')}"
            )
        return [
            Trained(*json.loads((Path(folder) / f"{number}").read_text())) for number in range(world_size)
        ]


def plugin_variables(name: str, options: Mapping[str, Any]) -> Any:
    """What a launcher keeps for a strategy while its ranks run: a context that gives variables."""
    from headway.strategies.registry import plugin_named, policy_named

    return plugin_named(name).launched_with(policy_named(name).model_validate(dict(options)))


def _rank() -> None:
    """The process of one rank of ``check_training``."""
    import torch.distributed as dist

    folder, said = sys.argv[1:]
    name, options, injected = json.loads(said)
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
    """``changed``, of an installed package, rewrites purely, comes back from a plan file, and trains as without it.

    A pass that refuses ``job`` (UnsupportedError), as one that was not measured does, is not replayed. Without
    ``same_numbers``, or where it changes the training, the live model only has to train. ``module`` makes that model,
    the same at each call, from 12 inputs to any output: for passes that need certain modules.
    """
    job = example_job() if job is None else job
    who = changed.describe()
    _check(bool(who), "describe() says nothing")
    _check(
        passes().get(changed.name) is type(changed), f"{changed.name} is not registered: install its package"
    )
    kept = _through_a_file(DistributedDataParallelStrategy(), job, changed)
    _check(kept == (changed,), f"{who} does not come back from a plan file")
    _check_permissions(changed.changes_training, frozenset((changed.permission,)) - {""}, who)
    ddp = DistributedDataParallelStrategy()
    try:
        with _said(who):
            once, twice = rewritten(job, (changed,)), rewritten(job, (changed,))
    except UnsupportedError:
        pass
    else:
        _check(once.world_size == job.world_size, f"{who}: rewrite() gives a job of other ranks")
        _check(simulate(once, ddp).step_ms == simulate(twice, ddp).step_ms, f"{who}: rewrite() is not pure")
    for proposed in type(changed).proposed(job):
        _check(isinstance(proposed, type(changed)), f"{who}: proposed() gives {proposed!r}")
    with _said(who):
        plain, under = (
            _pass_trained(each, _model() if module is None else module()) for each in (None, changed)
        )
    _check(all(map(math.isfinite, under)), f"{who}: parameters are not finite")
    if same_numbers and not changed.changes_training:
        worst = max(abs(a - b) for a, b in zip(plain, under, strict=True))
        _check(worst <= 1e-5, f"{who}: parameters are off those without it by {worst:.3g}")


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
    """What every rank ends with, and the collectives that it took: all ranks in this process, in lockstep."""
    who = codec.describe()
    reductions = [codec.reduce(each) for each in ranks]
    for reduction in reductions:
        is_generator = isinstance(reduction, Generator)
        _check(is_generator, f"{who}: reduce() is no generator that yields what is sent")
    sent: list[Sent] = []
    for rank, reduction in enumerate(reductions):
        try:
            sent.append(next(reduction))
        except StopIteration:
            raise AssertionError(f"{who}: rank {rank} asks for no collective") from None
    exchanges: list[Exchange] = []
    done: list[Reduced] = []
    while not done:
        for rank, each in enumerate(sent):
            _check(isinstance(each, Sent), f"{who}: rank {rank} yields {type(each).__name__}, expected Sent")
        results, size_bytes = _exchanged(sent)
        exchanges.append(Exchange(sent[0].kind, size_bytes))
        sent = []
        for reduction, result in zip(reductions, results, strict=True):
            try:
                sent.append(reduction.send(result))
            except StopIteration as stop:
                done.append(stop.value)
    _check(not sent, f"{who}: some ranks end before others")
    for rank, made in enumerate(done):
        _check(
            isinstance(made, Reduced),
            f"{who}: reduce() returns {type(made).__name__} on rank {rank}, expected Reduced",
        )
    return done, exchanges


def _exchanged(sent: Sequence[Sent]) -> tuple[list[torch.Tensor], int]:
    import torch

    operands = [each.operand for each in sent]
    own_bytes = operands[0].numel() * operands[0].element_size()
    _check(len({each.kind for each in sent}) == 1, "ranks ask for different collectives")
    if sent[0].kind == ALL_REDUCE:
        total = operands[0].clone()
        for operand in operands[1:]:
            total += operand
        return [total.clone() for _ in operands], own_bytes
    if sent[0].kind == ALL_GATHER:
        rows = torch.stack([each.view(-1) for each in operands])
        return [rows.clone() for _ in operands], own_bytes * len(operands)
    return [torch.stack([each[rank] for each in operands]) for rank in range(len(operands))], own_bytes


class Simulation:
    """Training steps of all ranks: error feedback included. ``shapes`` are those of the bucket's parameters."""

    def __init__(self, codec: Codec, shapes: Sequence[Shape], world_size: int, dtype: torch.dtype) -> None:
        import torch

        self.codec, self.shapes, self.world_size = codec, shapes, world_size
        numel = sum(map(math.prod, shapes))
        self.kept = [torch.zeros(numel, dtype=dtype) for _ in range(world_size)]
        self.memory: list[dict[int, torch.Tensor]] = [{} for _ in range(world_size)]
        self.keys = range(len(shapes))

    def step(self, flats: Sequence[torch.Tensor], keys: Sequence[int] | None = None) -> torch.Tensor:
        """The mean that all ranks get of ``flats``, one a rank."""
        import torch

        ranks = [
            Gradients(
                flat + self.kept[rank], self.shapes, keys or self.keys, rank, self.world_size, self.memory[rank]
            )
            for rank, flat in enumerate(flats)
        ]  # fmt: skip
        done, _ = reduced(self.codec, ranks)
        if self.codec.feeds_back:
            self.kept = [each.kept.clone() for each in done]
        equal = all(torch.equal(each.mean, done[0].mean) for each in done)
        _check(equal, f"{self.codec.describe()}: ranks end with different bits")
        return done[0].mean


def example_gradients(world_size: int, seed: int = 0, dtype: str = "float32") -> list[Gradients]:
    """A bucket of parameters of ``SHAPES`` on each rank, drawn by chance."""
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
    """``codec``, of an installed package, does all that codecs must: see the checks that it calls, and ``rounding``."""
    who = codec.describe()
    _check(bool(who), "describe() says nothing")
    _check(codecs().get(codec.name) is type(codec), f"{codec.name} is not registered: install its package")
    job = example_job()
    strategy = DistributedDataParallelStrategy(wire=(codec,))
    _check(_through_a_file(strategy, job) == strategy, f"{who} does not come back from a plan file")
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
    """What is sent is what ``exchanges`` says, all ranks get the same bits, and gradients are left as they are."""
    import torch

    who = f"{codec.describe()}, {world_size} ranks, {dtype}"
    ranks = example_gradients(world_size, dtype=dtype)
    before = [rank.flat.clone() for rank in ranks]
    done, exchanges = reduced(codec, ranks)
    asked = tuple(codec.exchanges(SHAPES, dtype, world_size))
    _check(tuple(exchanges) == asked, f"{who}: sent {exchanges}, and exchanges() says {asked}")
    _check(all(bool(each.mean.isfinite().all()) for each in done), f"{who}: the mean is not finite")
    _check(
        all(torch.equal(each.mean, done[0].mean) for each in done), f"{who}: ranks end with different bits"
    )
    unchanged = all(torch.equal(each.flat, flat) for each, flat in zip(ranks, before, strict=True))
    _check(unchanged, f"{who}: reduce() changes the gradients that it is given")
    _check(done[0].mean.shape == before[0].shape, f"{who}: the mean has another shape")
    _check(done[0].mean.dtype == before[0].dtype, f"{who}: the mean is of another type")
    _check(
        all((each.kept.numel() > 0) == codec.feeds_back for each in done),
        f"{who}: kept is not as feeds_back says",
    )
    costs = codec.default_us(2**20, world_size)
    _check(len(costs) > len(exchanges), f"{who}: default_us() has one time more than there are exchanges")
    _check(min(costs) > 0, f"{who}: computing takes time")


def check_feedback(codec: Codec, world_size: int, *, rounding: float = 0.0, steps: int = 20) -> None:
    """What was sent and what is kept add up to the gradients, over ``steps`` steps.

    Sums of few digits may lose ``rounding`` a step and rank besides.
    """
    import torch

    simulation = Simulation(codec, SHAPES, world_size, torch.float64)
    sent = given = torch.zeros(sum(map(math.prod, SHAPES)), dtype=torch.float64)
    for step in range(steps):
        flats = [example_gradient.flat for example_gradient in example_gradients(world_size, step, "float64")]
        given = given + torch.stack(flats).mean(0)
        sent = sent + simulation.step(flats)
        off = float((sent + torch.stack(simulation.kept).mean(0) - given).abs().max())
        most = max(1e-10, (step + 1) * world_size * rounding)
        _check(
            off <= most,
            f"{codec.describe()}: {off:.3g} is neither sent nor kept after {step + 1} steps. If sums lose that to "
            f"rounding, as those of float16 do, give check_codec(..., rounding=) what a step and rank may lose, "
            f"{off / (step + 1) / world_size:.1g} here",
        )


def check_not_finite(codec: Codec, world_size: int = 3) -> None:
    """An infinity or a NaN on one rank is seen in the mean on all, by which a GradScaler skips the step."""
    for harm in (math.inf, -math.inf, math.nan):
        ranks = example_gradients(world_size)
        ranks[1].flat[5] = harm
        done, _ = reduced(codec, ranks)
        seen = all(not bool(each.mean.isfinite().all()) for each in done)
        _check(seen, f"{codec.describe()}: {harm} on one rank is not seen in the mean")


# Readers.


def check_reader(reader: Reader, name: str, data: bytes, *, damages: int = 100) -> None:
    """``reader``, of an installed package, reads the document ``name`` of ``data``, and refuses it damaged.

    The document is cut, and bytes of it are changed, ``damages`` times, the same ones in each run.
    """
    who = f"the reader {reader.name}"
    _check(readers().get(reader.name) is reader, f"{who} is not registered: install its package")
    chosen = recognised(name, data[:SNIFFED_BYTES])
    _check(chosen is reader, f"{name} is recognised by {chosen.name if chosen else 'no reader'}")
    with _said(who):
        ranks = reader.read(Document(name, data)).ranks
    _check(bool(ranks), f"{who} finds no rank in {name}")
    for rank in ranks:
        steps = rank.events.of_kind(Kind.STEP)
        _check(len(steps) > 0 or rank.role == "server", f"{who}: a rank of {name} has no step")
        _check(bool((rank.events.duration_ns >= 0).all()), f"{who}: an event ends before it begins")
    draw = random.Random(0)
    for number in range(damages):
        harmed = bytearray(data[: draw.randrange(len(data) + 1)] if number % 2 else data)
        for _ in range(min(len(harmed), draw.choice((0, 1, 5)))):
            harmed[draw.randrange(len(harmed))] = draw.randrange(256)
        for lenient in (False, True):
            with _said(f"{who}, of a damaged document"), suppress(TraceError):
                reader.read(Document(name, bytes(harmed), "", lenient))
