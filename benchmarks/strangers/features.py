"""A plain loop with one option of DistributedDataParallel or torch.optim at a time."""

import argparse
import os

import torch
from data import GPT, Text
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("what")
parser.add_argument("--steps", type=int, default=24)
args = parser.parse_args()
init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(0)
what = args.what


class Unused(nn.Module):
    """A branch is taken in every other step."""

    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = GPT(layers=2), nn.Linear(256, 256), nn.Linear(256, 256)
        self.count = 0

    def forward(self, x, targets):
        self.count += 1
        logits = self.trunk(x)[0]
        logits = (self.left if self.count % 2 else self.right)(logits)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Recurrent(nn.Module):
    """After word_language_model: an LSTM with dropout."""

    def __init__(self, width=200):
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(256, width)
        self.rnn, self.decoder = (
            nn.LSTM(width, width, 2, dropout=0.2, batch_first=True),
            nn.Linear(width, 256),
        )

    def forward(self, x, targets):
        logits = self.decoder(self.drop(self.rnn(self.drop(self.encoder(x)))[0]))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


models = {"find-unused": Unused, "lstm": Recurrent}
options = {
    "static-graph": {"static_graph": True},
    "bucket-view": {"gradient_as_bucket_view": True},
    "find-unused": {"find_unused_parameters": True},
    "small-buckets": {"bucket_cap_mb": 0.5},
}
model = DDP(models.get(what, GPT)(), **options.get(what, {}))
if what == "fp16-hook":
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
if what == "zero":
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
elif what == "lbfgs":
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=2, history_size=4)
elif what == "fused":
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
averaged = torch.optim.swa_utils.AveragedModel(model.module) if what == "ema" else None
rows = Text()


def batch_of(step):
    batch = [rows[(step * 2 + rank) * 8 + i] for i in range(8)]
    return torch.stack([r[0] for r in batch]), torch.stack([r[1] for r in batch])


def closure():
    optimizer.zero_grad()
    loss = model(*current)[1]
    loss.backward()
    return loss


for step in range(args.steps):
    current = batch_of(step)
    if what == "lbfgs":
        loss = optimizer.step(closure)
    else:
        loss = closure()
        if what == "lstm":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    if averaged is not None:
        averaged.update_parameters(model.module)
if rank == 0:
    print(f"final loss {loss.item():.8f}", flush=True)
destroy_process_group()
