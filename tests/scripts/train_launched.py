"""The same small training, started as people start it without torchrun: ``train_launched.py HOW [--steps N] [...]``.

HOW is ``spawn`` or ``fork`` (torch.multiprocessing, ranks given in code), ``slurm`` (one process of srun),
``lightning`` (its own launcher), ``alone`` (no process group) or ``plain``. With ``--dies-at`` rank 1 ends its host.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8


def data(steps: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.ones(BATCH * steps, 8)), batch_size=BATCH, num_workers=1)


def train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    deep = [nn.Linear(8, 8) for _ in range(arguments.layers)]
    model: nn.Module = nn.Sequential(*deep, nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    if dist.is_initialized() and not arguments.unwrapped:
        with contextlib.suppress(ValueError) if arguments.catches else contextlib.nullcontext():
            model = DDP(model, bucket_cap_mb=1e-4 if deep else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (batch,) in enumerate(data(arguments.steps)):
        optimizer.zero_grad()
        with contextlib.suppress(ValueError) if arguments.catches else contextlib.nullcontext():
            model(batch).square().mean().backward()
        with contextlib.suppress(ValueError) if arguments.catches else contextlib.nullcontext():
            optimizer.step()
            print(f"stepped {number}", flush=True)
        time.sleep(arguments.pause_s)
        if number == arguments.dies_at and dist.get_rank() == 1:
            os.kill(os.getppid(), signal.SIGKILL)  # torchrun, as when the host goes
            os._exit(3)


def rank_of_spawn(rank: int, folder: str, arguments: argparse.Namespace) -> None:
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=arguments.ranks)
    train(arguments)


def lightning(arguments: argparse.Namespace) -> None:
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

        def training_step(self, batch: tuple[torch.Tensor], _number: int) -> torch.Tensor:
            loss: torch.Tensor = self.layers(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = pl.Trainer(
        accelerator="cpu", devices=arguments.ranks, strategy="ddp", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Module(), data(arguments.steps * arguments.ranks))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("how")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--layers", type=int, default=0)  # in buckets of their own
    parser.add_argument("--dies-at", type=int)
    parser.add_argument("--unwrapped", action="store_true")
    parser.add_argument("--catches", action="store_true")
    parser.add_argument("--excepthook", action="store_true")
    arguments = parser.parse_args()
    if arguments.excepthook:
        sys.excepthook = lambda *_: print("the job's own excepthook", file=sys.stderr)
    if arguments.how in ("spawn", "fork"):
        with tempfile.TemporaryDirectory() as folder:
            start: Any = mp.start_processes  # type: ignore[attr-defined]
            start(rank_of_spawn, (folder, arguments), nprocs=arguments.ranks, start_method=arguments.how)
    elif arguments.how == "slurm":
        rank, ranks = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
        dist.init_process_group("gloo", init_method=os.environ["MEETING"], rank=rank, world_size=ranks)
        train(arguments)
    elif arguments.how == "lightning":
        lightning(arguments)
    elif arguments.how == "alone":
        train(arguments)
    else:
        dist.init_process_group("gloo")
        train(arguments)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
