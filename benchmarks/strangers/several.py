"""Jobs with more than one model or optimizer: a GAN, a teacher and its student, low-rank adapters, two optimizers."""

import argparse
import os

import torch
from data import GPT, ConvNet, Images, Text
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("what", choices=["gan", "distil", "lora", "two-optimizers"])
parser.add_argument("--steps", type=int, default=24)
args = parser.parse_args()
init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(0)


class Adapter(nn.Module):
    def __init__(self, base, rank=64):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.02)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


def gan():
    generator = DDP(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 3 * 32 * 32), nn.Tanh()))
    critic = DDP(nn.Sequential(nn.Linear(3 * 32 * 32, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1)))
    of_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_d = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    images = Images().images.flatten(1)
    for step in range(args.steps):
        real = images[torch.arange(64) + (step + rank) % 64]
        fake = generator(torch.randn(64, 64))
        of_d.zero_grad()
        scores = critic(torch.cat([real, fake.detach()]))
        labels = torch.cat([torch.ones(64, 1), torch.zeros(64, 1)])
        loss_d = F.binary_cross_entropy_with_logits(scores, labels)
        loss_d.backward()
        of_d.step()
        of_g.zero_grad()
        loss = F.binary_cross_entropy_with_logits(critic(fake), torch.ones(64, 1))
        loss.backward()
        of_g.step()
    return loss


def distil():
    teacher = ConvNet(wide=64).eval().requires_grad_(False)
    student = DDP(ConvNet())
    optimizer = torch.optim.SGD(student.parameters(), lr=0.01, momentum=0.9)
    images = Images().images
    for step in range(args.steps):
        batch = images[torch.arange(16) + 16 * ((step * 2 + rank) % 15)]
        with torch.no_grad():
            wanted = teacher(batch).softmax(-1)
        loss = F.cross_entropy(student(batch), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss


def lora():
    model = GPT()
    model.requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.proj = Adapter(block.qkv), Adapter(block.proj)
    return train(DDP(model), [p for p in model.parameters() if p.requires_grad])


def two_optimizers():
    model = DDP(GPT())
    body = [p for n, p in model.named_parameters() if "head" not in n and "tokens" not in n]
    ends = [p for n, p in model.named_parameters() if "head" in n or "tokens" in n]
    return train(model, body, ends)


def train(model, *parts):
    optimizers = [torch.optim.AdamW(part, lr=1e-3) for part in parts]
    rows = Text()
    for step in range(args.steps):
        batch = [rows[(step * 2 + rank) * 8 + i] for i in range(8)]
        loss = model(torch.stack([r[0] for r in batch]), torch.stack([r[1] for r in batch]))[1]
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return loss


loss = {"gan": gan, "distil": distil, "lora": lora, "two-optimizers": two_optimizers}[args.what]()
if rank == 0:
    print(f"final loss {loss.item():.8f}", flush=True)
destroy_process_group()
