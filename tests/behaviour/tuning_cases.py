"""What ranks do for the tests of tuning while training, and the same training in a single process."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.behaviour.adaptive_models import adaptive
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway.integrations import plan_injection
from headway.integrations.parallelize import parallelize
from headway.job import Job
from headway.model import ModelSpec
from headway.plan import Plan
from headway.scheduling.buckets import BucketSchedule, GatherMode, forward_gather_order, make_buckets
from headway.scheduling.fusion import cut, fill
from headway.strategies.adaptive.policy import AdaptiveStrategy
from headway.strategies.adaptive.proposals import Setting, Trial, Tuned
from headway.strategies.adaptive.tuner import tune
from headway.strategies.adaptive.wrapper import AdaptiveDataParallel
from headway.strategies.candidates import Candidate
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.decoupled.shortlist import candidate
from headway.strategies.live.channels import observer as observing
from headway.strategies.live.module_spec import model_spec

ROWS, WIDTH = 4, 6
RELATIVE, ABSOLUTE = 1e-9, 1e-10
STEPS = 80  # in which every tuning ends
STEPS_OF_TWO = 2 * STEPS + 20
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)
    ).double()


def batch(step: int, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of ``rank``, or of all ranks where that is -1."""
    generator = torch.Generator().manual_seed(step)
    both = torch.randn(world_size * ROWS, WIDTH + 3, generator=generator, dtype=torch.float64)
    if rank >= 0:
        both = both[rank * ROWS :][:ROWS]
    return both[:, :WIDTH], both[:, WIDTH:]


class Script:
    """One training script: plain steps, accumulated ones, evaluations, copies, and frozen layers where asked for."""

    def __init__(self, model: Any, optimizer: Any, rank: int, world_size: int) -> None:
        self.model, self.optimizer = model, optimizer
        self.rank, self.world_size = rank, world_size
        self.alone = rank < 0
        self.sometimes_evaluate = self.sometimes_accumulate = False
        self.frozen: dict[int, bool] = {}  # step: whether the first layer is frozen from it on

    def run(self, steps: int, after: Callable[[int], object] = lambda _step: None) -> None:
        for step in range(steps):
            if step in self.frozen:
                bare = self.model if self.alone else self.model.module
                for parameter in bare[0].parameters():
                    parameter.requires_grad_(not self.frozen[step])
                    parameter.grad = None
            self.optimizer.zero_grad()
            passes = 3 if self.sometimes_accumulate and step % 4 == 3 else 1
            for number in range(passes):
                last = number == passes - 1
                with nullcontext() if last or self.alone else self.model.no_sync():
                    self.loss(step + 1000 * number).backward()
            self.optimizer.step()
            if self.sometimes_evaluate and step % 3 == 1 and self.rank != 1:  # on some ranks only
                with torch.no_grad():
                    self.loss(step)
                copy.deepcopy(self.model)
            after(step)

    def loss(self, step: int) -> torch.Tensor:
        x, y = batch(step, self.rank, self.world_size)
        return nn.functional.mse_loss(self.model(x), y)


def seen(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = optimizer.state_dict()["state"]
    return {
        "parameters": [p.detach().flatten().tolist() for p in model.parameters()],
        "state": [
            [state[index][key].flatten().tolist() for key in sorted(state[index])] for index in sorted(state)
        ],
        "digest": hashlib.sha256(
            b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        ).hexdigest(),
    }


def alone(optimizer: str, steps: int, world_size: int, **options: Any) -> dict[str, Any]:
    """The reference: all ranks' rows in one batch, nothing wrapped."""
    model = net()
    script = Script(model, OPTIMIZERS[optimizer](model.parameters()), -1, world_size)
    for name, value in options.items():
        setattr(script, name, value)
    script.run(steps)
    return seen(model, script.optimizer)


def _flat(value: Any) -> list[float]:
    return [number for item in value for number in _flat(item)] if isinstance(value, list) else [value]


def agrees(results: Sequence[dict[str, Any]], reference: dict[str, Any]) -> None:
    """All ranks have the same to the last bit, and what one process has for all data but for rounding."""
    assert len({result["digest"] for result in results}) == 1
    for result in results:
        for what in ("parameters", "state"):
            close = pytest.approx(_flat(reference[what]), rel=RELATIVE, abs=ABSOLUTE)
            assert _flat(result[what]) == close, what


class Scripted:
    """Proposes forms, channels and cuts that the planner would hardly choose, and says that the third is best."""

    learns = False

    def __init__(self) -> None:
        self.left: list[Candidate] = []

    def begin(self, setting: Setting) -> None:
        forms: Sequence[GatherMode] = ("parameters", "gradients", "parameters", "gradients", "parameters")
        self.left = [
            candidate(
                f"number {n}",
                schedule_of(setting.question.model, 200 * (n + 1), form, 1 + n % 2),
                setting.question.model,
            )
            for n, form in enumerate(forms)
        ]

    def is_ready(self) -> bool:
        return True

    def propose(self) -> Candidate | None:
        return self.left.pop(0) if self.left else None

    def tell(self, candidate: Candidate, measured_ms: float) -> None:
        assert measured_ms > 0

    def choose(self, trials: Sequence[Trial]) -> int:
        return 2


def schedule_of(model: ModelSpec, cap_bytes: int, gather: GatherMode, channels: int) -> BucketSchedule:
    buckets = make_buckets(fill(cut(model.ready_parameters(), cap_bytes // 2), model, cap_bytes), model)
    return BucketSchedule(buckets, forward_gather_order(model, buckets), gather, channels)


def _train(
    wrapped: AdaptiveDataParallel, name: str, rank: int, world_size: int, steps: int, **options: Any
) -> Any:
    script = Script(wrapped, OPTIMIZERS[name](wrapped.parameters()), rank, world_size)
    for option, value in options.items():
        setattr(script, option, value)
    schedules: list[str] = []
    script.run(
        steps, lambda _step: schedules.append(hashlib.sha256(repr(wrapped.strategy).encode()).hexdigest())
    )
    result = seen(wrapped, script.optimizer)
    tuned = wrapped.tuning
    assert tuned is not None
    assert wrapped.tuner is None
    spec = model_spec(wrapped.module)
    candidates = [candidate.strategy for candidate in tuned.candidates]
    return result | {
        "schedules": schedules,
        "steps": tuned.steps,
        "chosen": tuned.chosen,
        "ended early": tuned.ended_early,
        "tried": [candidate.name for candidate in tuned.candidates],
        "forms": forms_of(tuned),
        "predicted": tuned.predicted_ms,
        "measured": tuned.measured_ms,
        "in force": None if tuned.chosen is None else wrapped.strategy == candidates[tuned.chosen],
        "strategy": tuned.strategy == wrapped.strategy,
        "decides": wrapped.is_stock or tuned.strategy.decide(Job.of(spec)) == wrapped.schedule,
        "stock": wrapped.is_stock,
        "cluster": None if tuned.cluster is None else tuned.cluster.model_dump(mode="json"),
        "hooks": sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in wrapped.module.modules()),
    }


def forms_of(tuned: Tuned) -> list[str]:
    return ["stock" if c.is_stock else getattr(c.strategy, "gather", "") for c in tuned.candidates]


def scripted(rank: int, world_size: int, optimizer: str, steps: int, options: dict[str, Any]) -> Any:
    wrapped = adaptive(net(), DecoupledStrategy(bucket_cap_bytes=524), bucket_cap_mb=0.0005)
    tune(wrapped, Scripted())
    return _train(wrapped, optimizer, rank, world_size, steps, **options)


def planned(rank: int, world_size: int, optimizer: str, steps: int, options: dict[str, Any]) -> Any:
    """Tuned by the product's own proposer, with the log and what is left behind."""
    with _logged() as lines:
        wrapped = adaptive(net(), DecoupledStrategy(bucket_cap_bytes=512), tune=True)
        result = _train(wrapped, optimizer, rank, world_size, steps, **options)
    null = type(observing.observer()).__name__
    return result | {"log": lines, "observer": null}


def planned_on_hosts(rank: int, world_size: int, places: str) -> Any:
    """The same where hosts have a letter each."""
    os.environ["HEADWAY_HOST"] = places[rank]
    return planned(rank, world_size, "sgd", STEPS, {})


def freezing(rank: int, world_size: int, changes: int) -> Any:
    """Layers are frozen and unfrozen while the tuner works."""
    wrapped = adaptive(net(), DecoupledStrategy(bucket_cap_bytes=512), tune=True)
    frozen = {6 + 5 * change: change % 2 == 0 for change in range(changes)}
    return _train(wrapped, "sgd", rank, world_size, STEPS, frozen=frozen)


def injected(rank: int, world_size: int) -> Any:
    """An unmodified script under a plan that says tune."""
    model = model_spec(net())
    plan_injection.install(Plan.data_parallel(AdaptiveStrategy(), world_size, model))
    wrapped: Any = DistributedDataParallel(net(), bucket_cap_mb=1)
    plan_injection.uninstall()
    return _train(wrapped, "sgd", rank, world_size, STEPS)


def left_alone(rank: int, world_size: int) -> dict[str, str]:
    """Ways in which tuning ends without a choice; returns why."""
    reasons = {}

    def trained(name: str, act: Callable[[Any, Any, int], object], steps: int = 12) -> None:
        inner = net()
        optimizer = OPTIMIZERS["sgd"](inner.parameters())
        wrapped: Any = parallelize(inner, optimizer)
        assert wrapped.tuner is not None
        for step in range(steps):
            act(wrapped, optimizer, step)
        reasons[name] = "goes on" if wrapped.tuning is None else wrapped.tuning.ended_early

    def plain(wrapped: Any, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        x, y = batch(step, rank, world_size)
        nn.functional.mse_loss(wrapped(x), y).backward()
        optimizer.step()

    def other_schedule(wrapped: Any, optimizer: Any, step: int) -> None:
        plain(wrapped, optimizer, step)
        if step == 5:
            wrapped.reschedule(schedule_of(model_spec(wrapped.module), 300, "parameters", 1))

    def no_backward(wrapped: Any, _optimizer: Any, step: int) -> None:
        wrapped(batch(step, rank, world_size)[0])

    def copied(wrapped: Any, optimizer: Any, step: int) -> None:
        plain(wrapped, optimizer, step)
        if step == 5:  # in the middle of the watched steps
            other = pickle.loads(pickle.dumps(copy.deepcopy(wrapped.module)))
            other(batch(step, rank, world_size)[0]).sum().backward()

    trained("another schedule", other_schedule)
    trained("no backward", no_backward, 60)
    trained("copies", copied)
    return reasons


def several_forwards(rank: int, world_size: int) -> Any:
    """Two forwards before each backward, and two models, of which each is tuned in its turn."""
    wrapped: Any = adaptive(net(), DecoupledStrategy(bucket_cap_bytes=512), tune=True)
    other: Any = adaptive(net(), DecoupledStrategy(bucket_cap_bytes=256), tune=True)
    optimizer = OPTIMIZERS["adam"]([*wrapped.parameters(), *other.parameters()])
    trained = {wrapped: 0, other: 0}  # steps before it was tuned
    for step in range(STEPS_OF_TWO):
        optimizer.zero_grad()
        x, y = batch(step, rank, world_size)
        first, second = wrapped(x), wrapped(x.tanh())
        nn.functional.mse_loss(first + second + other(x), y).backward()
        optimizer.step()
        for model in trained:
            trained[model] += model.tuning is None
    results = [seen(wrapped, optimizer), seen(other, optimizer)]
    return [
        result | {"chosen": model.tuning.chosen, "steps": model.tuning.steps, "trained": trained[model]}
        for result, model in zip(results, trained, strict=True)
    ]


def several_forwards_alone(world_size: int) -> Any:
    model, other = net(), net()
    optimizer = OPTIMIZERS["adam"]([*model.parameters(), *other.parameters()])
    for step in range(STEPS_OF_TWO):
        optimizer.zero_grad()
        x, y = batch(step, -1, world_size)
        nn.functional.mse_loss(model(x) + model(x.tanh()) + other(x), y).backward()
        optimizer.step()
    return [seen(model, optimizer), seen(other, optimizer)]


def lopsided(rank: int, world_size: int) -> Any:
    """Rank 0 evaluates with gradients recorded, and calls the model far more often before each backward."""
    wrapped: Any = adaptive(net(), DecoupledStrategy(bucket_cap_bytes=512), tune=True)
    optimizer = OPTIMIZERS["sgd"](wrapped.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step, rank, world_size)
        for _ in range(60 if rank == 0 else 2):
            loss = nn.functional.mse_loss(wrapped(x), y)
        loss.backward()
        optimizer.step()
        if rank == 0:
            wrapped.eval()
            wrapped(x)
            wrapped.train()
        dist.barrier()
    return seen(wrapped, optimizer) | {"chosen": wrapped.tuning.chosen}


def joined(rank: int, world_size: int, before: int, inputs: tuple[int, ...]) -> Any:
    """A join with uneven inputs in the middle of tuning: the tuner pauses, and goes on behind it."""
    wrapped: Any = adaptive(net(), DecoupledStrategy(bucket_cap_bytes=512), tune=True)
    optimizer = OPTIMIZERS["sgd"](wrapped.parameters())

    def steps(count: int) -> None:
        for step in range(count):
            optimizer.zero_grad()
            x, y = batch(step, rank, world_size)
            nn.functional.mse_loss(wrapped(x), y).backward()
            optimizer.step()

    steps(before)
    with wrapped.join():
        steps(inputs[rank])
    unfinished = wrapped.tuning is None
    with wrapped.join(enable=False):
        steps(STEPS)
    tuned = wrapped.tuning
    return {"digest": seen(wrapped, optimizer)["digest"], "unfinished": unfinished, "chosen": tuned.chosen,
            "uneven": wrapped.uneven is not None, "steps": tuned.steps}  # fmt: skip


def whole_gradients(rank: int, world_size: int) -> Any:
    """An optimizer that looks at whole gradients: only their gathers are tried."""
    wrapped: Any = adaptive(net(), DecoupledStrategy(bucket_cap_bytes=512), tune=True)

    class Own(torch.optim.SGD):
        """A subclass, which may do anything."""

    optimizer = Own(wrapped.parameters(), lr=0.05, momentum=0.9)
    script = Script(wrapped, optimizer, rank, world_size)
    script.run(STEPS)
    return seen(wrapped, optimizer) | {"forms": forms_of(wrapped.tuning)}


@contextmanager
def _logged() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("headway")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)


def planned_apart(rank: int, world_size: int) -> Any:
    """A model of many parameters: rank 0's process plans, and all train on until it has."""
    torch.manual_seed(0)
    layers = [layer for _ in range(20) for layer in (nn.Linear(6, 6), nn.Tanh())]
    wrapped = adaptive(
        nn.Sequential(*layers).double(), DecoupledStrategy(bucket_cap_bytes=1048), bucket_cap_mb=0.001
    )
    tune(wrapped)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    deadline_s = time.monotonic() + 150
    while wrapped.tuning is None and time.monotonic() < deadline_s:
        time.sleep(0.02)  # busy ranks would leave next to nothing to a nice process
        optimizer.zero_grad()
        wrapped(torch.randn(4, 6, generator=data, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    tuned = wrapped.tuning
    assert tuned is not None
    own = [parameter.sum().item() for parameter in wrapped.parameters()]
    names = [candidate.name for candidate in tuned.candidates]
    return {"ended early": tuned.ended_early, "steps": tuned.steps, "planned": names, "own": own}
