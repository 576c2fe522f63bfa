"""After the DDP tutorial series' multigpu_torchrun.py: a Trainer class, snapshots, a DistributedSampler."""

import argparse
import os

import torch
from data import ConvNet, Images
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every, snapshot_path):
        self.rank = int(os.environ["RANK"])
        self.train_data, self.optimizer, self.save_every = train_data, optimizer, save_every
        self.snapshot_path = snapshot_path
        self.model = DDP(model)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss

    def train(self, epochs):
        for epoch in range(epochs):
            self.train_data.sampler.set_epoch(epoch)
            for source, targets in self.train_data:
                loss = self._run_batch(source, targets)
            if self.rank == 0 and epoch % self.save_every == 0:
                state = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch}
                torch.save(state, self.snapshot_path)
        return loss.item()


def main(epochs, steps, batch_size, snapshot):
    init_process_group(backend="gloo")
    torch.manual_seed(0)
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    data = Images(count=steps // epochs * batch_size * int(os.environ["WORLD_SIZE"]))
    loader = DataLoader(data, batch_size=batch_size, shuffle=False, sampler=DistributedSampler(data))
    loss = Trainer(model, loader, optimizer, 1, snapshot).train(epochs)
    if int(os.environ["RANK"]) == 0:
        print(f"final loss {loss:.8f}", flush=True)
    destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch_size", type=int, default=16)
    arguments = parser.parse_args()
    main(2, arguments.steps, arguments.batch_size, os.environ.get("SNAPSHOT", os.devnull))
