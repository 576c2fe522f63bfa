"""A job as srun starts it: one process a task, its rank from Slurm's variables, a tcp:// rendezvous."""

import argparse
import os

import torch
import torch.distributed as dist
from data import ConvNet, Images
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--init", required=True)
args = parser.parse_args()
rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", init_method=args.init, rank=rank, world_size=world)
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(ConvNet(), gradient_as_bucket_view=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = Images()
for step in range(args.steps):
    rows = [data[(step * world + rank) * 16 + i] for i in range(16)]
    images, labels = torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if rank == 0:
    print(f"final loss {loss.item():.8f}", flush=True)
dist.destroy_process_group()
