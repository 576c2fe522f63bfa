"""After pytorch/examples' imagenet/main.py: mp.spawn of one worker a device, tcp:// rendezvous, meters, top-1."""

import argparse

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from data import ConvNet, Images
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--world-size", type=int, default=1)  # of nodes
parser.add_argument("--rank", type=int, default=0)
parser.add_argument("--dist-url", default="tcp://127.0.0.1:23456")
parser.add_argument("--workers-per-node", type=int, default=1)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--steps", type=int, default=24)


def main_worker(gpu, per_node, args):
    args.rank = args.rank * per_node + gpu
    args.world_size *= per_node
    dist.init_process_group("gloo", init_method=args.dist_url, world_size=args.world_size, rank=args.rank)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(ConvNet())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
    data = Images(count=args.steps * args.batch_size * args.world_size)
    sampler = torch.utils.data.distributed.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    model.train()
    for images, target in loader:
        output = model(images)
        loss = criterion(output, target)
        correct = output.argmax(1).eq(target).float().mean().item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    if args.rank == 0:
        print(f"top-1 {correct:.2f} final loss {loss.item():.8f}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    args = parser.parse_args()
    mp.spawn(main_worker, nprocs=args.workers_per_node, args=(args.workers_per_node, args))
