"""After nanoGPT's train.py: one flat script; toggled sync, clipping, schedules, compile and GradScaler as options."""

import argparse
import math
import os
from contextlib import nullcontext

import torch
from data import GPT, text
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--clip", type=float, default=1.0)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--compile", default="")  # "before" or "after" wrapping
parser.add_argument("--tied", action="store_true")
parser.add_argument("--no-sync", action="store_true")
parser.add_argument("--log-norm", action="store_true")
parser.add_argument("--checkpoint", action="store_true")
args = parser.parse_args()

init_process_group(backend="gloo")
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(1337)
data, block = text(), 64
pick = torch.Generator().manual_seed(1337 + rank)


def get_batch():
    ix = torch.randint(len(data) - block - 1, (args.batch,), generator=pick)
    return torch.stack([data[i : i + block] for i in ix]), torch.stack(
        [data[i + 1 : i + 1 + block] for i in ix]
    )


dtype = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[args.dtype]
ctx = nullcontext() if dtype is None else torch.amp.autocast("cpu", dtype=dtype)
model = GPT(tied=args.tied)
if args.checkpoint:
    from torch.utils.checkpoint import checkpoint

    for each in model.blocks:
        each.forward = (lambda whole: lambda x: checkpoint(whole, x, use_reentrant=False))(each.forward)
scaler = torch.amp.GradScaler("cpu", enabled=args.dtype == "float16")
decay = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
    lr=1e-3,
    betas=(0.9, 0.95),
)
if args.compile == "before":
    model = torch.compile(model)
model = DDP(model)
if args.compile == "after":
    model = torch.compile(model)

X, Y = get_batch()
for step in range(args.steps):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / args.steps))
    for micro in range(args.accumulate):
        last = micro == args.accumulate - 1
        if not args.no_sync:
            model.require_backward_grad_sync = last
        with model.no_sync() if args.no_sync and not last else nullcontext():
            with ctx:
                logits, loss = model(X, Y)
                loss = loss / args.accumulate
            X, Y = get_batch()
            scaler.scale(loss).backward()
    if args.clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    if args.log_norm:
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    lossf = loss.item() * args.accumulate
if rank == 0:
    print(f"final loss {lossf:.8f}", flush=True)
destroy_process_group()
