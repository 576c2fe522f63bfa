"""A small job of Lightning: the trainer runs forward and backward in a closure that it hands to the optimizer.

``train_lightning.py RESULT [STEPS] [by-hand]`` trains, validates, tests and saves; rank 0 writes the parameters' and
the checkpoint's sums to RESULT. ``by-hand`` steps as Lightning's manual optimization has it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Small(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 8)
        )

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        loss: torch.Tensor = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        return loss

    def validation_step(self, batch: list[torch.Tensor], _index: int) -> None:
        self.log("loss", nn.functional.mse_loss(self.layers(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class ByHand(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, index)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer.step()
        return loss


def data() -> DataLoader[tuple[torch.Tensor, ...]]:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(96, 64), torch.randn(96, 8)), batch_size=4)


def state_of(checkpoint: Path) -> list[float]:
    saved = torch.load(checkpoint, weights_only=False)["optimizer_states"][0]["state"]
    return [value.double().sum().item() for one in saved.values() for value in one.values()]


def main() -> None:
    torch.set_num_threads(1)
    pl.seed_everything(0)
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 10
    by_hand = "by-hand" in sys.argv
    with tempfile.TemporaryDirectory() as folder:
        keep = pl.callbacks.ModelCheckpoint(
            dirpath=folder, filename="last", every_n_train_steps=max(1, steps - 2)
        )
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_steps=steps, logger=False, callbacks=[keep],
            enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=None if by_hand else 1.0,
        )  # fmt: skip
        model = ByHand() if by_hand else Small()
        trainer.fit(model, data(), data())
        tested = trainer.test(model, data(), verbose=False)[0]["loss"]
        validated = trainer.validate(model, data(), verbose=False)[0]["loss"]
        last = Path(trainer.strategy.broadcast(folder)) / "at the end.ckpt"
        trainer.save_checkpoint(last)
        if trainer.is_global_zero:
            result = {
                "parameters": [parameter.double().sum().item() for parameter in model.parameters()],
                "state": state_of(Path(keep.best_model_path)), "at the end": state_of(last),
                "losses": [tested, validated],
            }  # fmt: skip
            Path(sys.argv[1]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
