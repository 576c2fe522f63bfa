"""Cases: a checkpoint saved by two ranks at any moment goes on as if nothing had happened, on any number of ranks.

Every step trains on the same twelve rows, however many ranks share them. The reference is trained without a break.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.behaviour.decoupled.job import ALONE, DDP, GRADIENTS, PARAMETERS, Job, case, mlp, rows, wrap
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

CHECKPOINTS = "checkpoints"  # the mode of these cases: each wraps in ways of its own
MODES = (DDP, GRADIENTS, PARAMETERS)
ROWS, STEPS, SAVED_AT = 12, 6, 3

MOMENTS = ("after step", "after backward", "after zero_grad")
RESUMED = {"after step": SAVED_AT + 1, "after backward": SAVED_AT, "after zero_grad": SAVED_AT + 1}
FORMATS = ("torch.save on rank 0", "DCP of state_dict", "DCP of get_state_dict")


class Training:
    """A model, its optimizer and its scheduler, and the steps of this rank."""

    def __init__(self, job: Job, mode: str, seed: int = 0) -> None:
        self.model = wrap(mlp(seed), mode)
        self.bare = self.model.module
        weights = [p for p in self.bare.parameters() if p.dim() > 1]
        others = [p for p in self.bare.parameters() if p.dim() == 1]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self._job = job
        whole = mode == ALONE
        self._named = (
            self.bare if whole else self.model
        )  # what names are made of: a wrapper's prefix is known
        self._mine = slice(None) if whole else slice(job.rank, None, job.world_size)
        self._mean: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone if whole else job.mean

    def step(self, step: int, at: Callable[[str], None] = lambda moment: None) -> torch.Tensor:
        """One step; ``at`` is called at each moment of it. Returns the loss of all rows."""
        x, y = rows(ROWS, step)
        loss = nn.functional.mse_loss(self.model(x[self._mine]), y[self._mine])
        loss.backward()
        at("after backward")
        self.optimizer.step()
        self.scheduler.step()
        at("after step")
        self.optimizer.zero_grad()
        at("after zero_grad")
        return self._mean(loss.detach())

    # What the formats write and read ------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "model": self.bare.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.bare.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])

    def state_by_name(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._named, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def load_by_name(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self._named, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.scheduler.load_state_dict(state["scheduler"])


def _save(training: Training, form: str, path: Path, rank: int) -> None:
    if form == "DCP of state_dict":
        save(training.state(), checkpoint_id=path)
    elif form == "DCP of get_state_dict":
        save(training.state_by_name(), checkpoint_id=path)
    elif rank == 0:
        torch.save(training.state(), path)


def _load(training: Training, form: str, path: Path, mode: str, rank: int) -> None:
    if form == "torch.save on rank 0":
        training.load(torch.load(path))
    elif form == "DCP of state_dict":
        if mode == ALONE:  # without any communication: turned into a plain file first
            plain = path.with_name(f"{path.name} on rank {rank}")
            dcp_to_torch_save(path, plain)
            state = torch.load(plain, weights_only=False)
            by_index = state["optimizer"]["state"]  # the format keeps all keys as text
            state["optimizer"]["state"] = {int(index): value for index, value in by_index.items()}
            training.load(state)
            return
        training.step(50)  # so that there is state to load into
        state = training.state()
        load(state, checkpoint_id=path)
        training.load(state)
    else:
        state = training.state_by_name()
        load(state, checkpoint_id=path, no_dist=mode == ALONE)
        training.load_by_name(state)


def _saving(mode: str, moment: str, form: str, job: Job) -> None:
    """Training goes on after the checkpoint, too, as if nothing had been saved."""
    training = Training(job, ALONE if job.alone else mode)
    job.models.append(training.model)

    def at(step: int, now: str) -> None:
        if (step, now) == (SAVED_AT, moment) and not job.alone:
            assert job.folder is not None
            _save(training, form, job.folder / _file(mode, moment, form), job.rank)

    for step in range(STEPS):
        job.see("loss", training.step(step, partial(at, step)))


def _resuming(mode: str, saved_by: str, moment: str, form: str, job: Job) -> None:
    first = RESUMED[moment]
    if job.alone:
        training = Training(job, ALONE)
        for step in range(first):
            training.step(step)
    else:
        assert job.folder is not None
        training = Training(job, mode, seed=77)
        _load(training, form, job.folder / _file(saved_by, moment, form), mode, job.rank)
    job.models.append(training.model)
    for step in range(first, STEPS):
        job.see("loss", training.step(step))
    job.see("optimizer", training.optimizer.state_dict()["state"])


def _file(mode: str, moment: str, form: str) -> str:
    return f"{mode}, {moment}, {form}"


def _ways(form: str, moment: str, world_size: int) -> list[tuple[str, str]]:
    """Who saves and in which way it is resumed: everything once, then what differs by format and moment."""
    ours = [mode for mode in MODES if mode != DDP]
    if world_size == 4:
        return [(mode, other) for mode in ours for other in (DDP, mode)] if moment == "after step" else []
    if (form, moment) == (FORMATS[0], "after step"):
        return [(saved_by, mode) for saved_by in MODES for mode in (ALONE, *MODES)]
    return [
        *((mode, other) for mode in ours for other in (DDP, mode)),
        *((mode, ALONE) for mode in ours if moment == "after step"),
        (DDP, DDP),
    ]


def _register() -> None:
    for form in FORMATS:
        for moment in MOMENTS:
            for saved_by in MODES:
                case(name=f"save {_file(saved_by, moment, form)}", only_in=[CHECKPOINTS], world_sizes=[2])(
                    partial(_saving, saved_by, moment, form)
                )
            sizes: dict[tuple[str, str], list[int]] = {}
            for world_size in (3, 4):
                for way in _ways(form, moment, world_size):
                    sizes.setdefault(way, []).append(world_size)
            for (saved_by, mode), world_sizes in sizes.items():
                case(
                    name=f"resume in {mode} what was saved by {_file(saved_by, moment, form)}",
                    only_in=[CHECKPOINTS],
                    world_sizes=world_sizes,
                )(partial(_resuming, mode, saved_by, moment, form))


_register()
