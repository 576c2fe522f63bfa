"""Ranks that train under stock DDP, with scripts that look at gradients and values, in several ways, or do not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import headway

FIRST, LAST = 2, 6


class Checked(torch.optim.SGD):
    """Refuses to step by parameters that are not ordinary ones."""

    def step(self, closure: Any = None) -> Any:
        """Step, with a closure as the base class does."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            _check_ordinary(group["params"])
        return super().step()


def _check_ordinary(parameters: Any) -> None:
    assert all(type(p) is nn.Parameter for p in parameters), [type(p) for p in parameters]


class Net(nn.Sequential):
    """Refuses to compute with parameters that are not ordinary ones."""

    def forward(self, x: Any) -> Any:
        _check_ordinary(self.parameters())
        return super().forward(x)  # type: ignore[no-untyped-call]


def _clip_by_hand(model: nn.Module, _step: int) -> None:
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(torch.clamp(0.1 / (norm + 1e-6), max=1.0))


def _log_sometimes(model: Any, step: int) -> None:
    if step % 2:
        float(model.module[0].weight.grad.norm())


def _look_around_clipping(model: Any, _step: int) -> None:
    float(model.module[0].weight.grad.norm())
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    float(model.module[2].weight.grad.norm())


def _skip(model: Any, step: int) -> None:
    if step % 2:
        model.zero_grad()


LOOKS: dict[str, Callable[[Any, int], None]] = {
    "none": lambda model, step: None,
    "by hand": _clip_by_hand,
    "sometimes": _log_sometimes,
    "around clipping": _look_around_clipping,
    "clears": _skip,
}


def _average(model: Any) -> Callable[[int], None]:
    averaged = torch.optim.swa_utils.AveragedModel(model.module)
    return lambda step: averaged.update_parameters(model.module)


def _save_sometimes(model: Any) -> Callable[[int], None]:
    def save(step: int) -> None:
        if step % 2:
            copy.deepcopy(model.module[2])

    return save


def _about_neither(model: Any) -> Callable[[int], None]:
    def clear(_step: int) -> None:
        model.zero_grad()
        assert all(p.requires_grad and p.grad is None and p.shape for p in model.parameters())

    return clear


AFTER: dict[str, Callable[[Any], Callable[[int], None]]] = {
    "averages": _average,
    "saves": _save_sometimes,
    "about neither": _about_neither,
}
"""What is done between a step and the next forward."""


def looks(rank: int, _world_size: int, folder: str) -> dict[str, list[list[float]]]:
    """The losses of each job as it is, and as it is while it is recorded."""
    losses: dict[str, list[list[float]]] = {}
    for name, look in LOOKS.items():
        for closure in (False, True) if name == "by hand" else (False,):
            label = f"{name}, closure" if closure else name
            losses[label] = [_trained(rank, look, closure=closure)]
            with headway.record(Path(folder, label), first_step=FIRST, stop_step=LAST):
                losses[label].append(_trained(rank, look, closure=closure))
    for name, after in AFTER.items():
        losses[name] = [_trained(rank, LOOKS["none"], after)]
        with headway.record(Path(folder, name), first_step=FIRST, stop_step=LAST):
            losses[name].append(_trained(rank, LOOKS["none"], after))
    return losses


def _trained(
    rank: int,
    look: Callable[[Any, int], None],
    after: Callable[[Any], Callable[[int], None]] | None = None,
    *,
    closure: bool = False,
) -> list[float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = Checked(model.parameters(), lr=0.1)
    stepped = after(model) if after is not None else None
    losses: list[float] = []
    for step in range(LAST + 1):

        def backward(step: int = step) -> None:
            optimizer.zero_grad()
            with model.no_sync():  # accumulates
                model(torch.full((2, 4), rank + step / 2)).square().mean().backward()
            loss = model(torch.full((2, 4), rank + step / 3)).square().mean()
            loss.backward()
            losses.append(float(loss.detach()))
            look(model, step)

        if closure:
            optimizer.step(backward)
        else:
            backward()
            optimizer.step()
        if stepped is not None:
            stepped(step)
    _check_ordinary(model.parameters())
    return losses


def ends_where_looks_are_watched(rank: int, _world_size: int, folder: str) -> None:
    """A recording ends, and a script fails, where looks are watched."""

    class FaultError(Exception):
        pass

    for name in ("ends", "fails"):
        net = nn.Linear(4, 1)
        with suppress(FaultError), headway.record(Path(folder, name), first_step=1, stop_step=9):
            model = DistributedDataParallel(net)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.step()
                model(torch.ones(2, 4)).sum().backward()
            assert not any(type(p) is nn.Parameter for p in net.parameters())
            _check_ordinary(copy.deepcopy(net).parameters())
            optimizer.step()
            assert not any(type(p) is nn.Parameter for p in net.parameters())
            _check_ordinary(copy.deepcopy(net).parameters())
            if name == "fails":
                raise FaultError
        _check_ordinary(net.parameters())
