"""After pytorch/examples' distributed/FSDP2: fully_shard on every block and on the whole."""

import argparse
import os

import torch
from data import GPT, Text
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=24)
args = parser.parse_args()
init_process_group("gloo")
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (world,))
model = GPT()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
rows = Text()
for step in range(args.steps):
    batch = [rows[(step * world + rank) * 8 + i] for i in range(8)]
    loss = model(torch.stack([r[0] for r in batch]), torch.stack([r[1] for r in batch]))[1]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    print(f"final loss {loss.item():.8f}", flush=True)
destroy_process_group()
