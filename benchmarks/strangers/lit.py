"""A Lightning job, started as its documentation says: `python lit.py` on every node, or under torchrun."""

import argparse

import pytorch_lightning as pl
import torch
from data import GPT, ConvNet, Images, Text
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--nodes", type=int, default=1)
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--clip", type=float, default=None)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--model", default="gpt")


class Language(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = GPT()

    def training_step(self, batch, index):
        loss = self.model(*batch)[1]
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Vision(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = ConvNet()

    def training_step(self, batch, index):
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


if __name__ == "__main__":
    args = parser.parse_args()
    pl.seed_everything(0)
    module, data, batch = (Language(), Text(), 8) if args.model == "gpt" else (Vision(), Images(), 16)
    loader = torch.utils.data.DataLoader(data, batch_size=batch)
    trainer = pl.Trainer(
        accelerator="cpu", devices=args.devices, num_nodes=args.nodes, strategy="ddp",
        max_steps=args.steps, gradient_clip_val=args.clip, accumulate_grad_batches=args.accumulate, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader)
    if trainer.global_rank == 0:
        print(f"final loss {trainer.callback_metrics['loss'].item():.8f}", flush=True)
