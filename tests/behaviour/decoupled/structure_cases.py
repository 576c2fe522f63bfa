"""Cases: models whose parameters are shared, recomputed or normalised, and several models at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tests.behaviour.decoupled.job import CUDA, FEW_ULPS, WIDTH, Job, Share, case, mlp, sgd, state_of, train
from torch import nn
from torch.utils.checkpoint import checkpoint


class Tied(nn.Module):
    """One weight in two layers, and a layer whose parameters are used without calling it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.inner.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(torch.tanh(self.inner(x))) * self.scale
        return nn.functional.linear(x, self.head.weight, self.head.bias)


@case()
def tied_weights(job: Job) -> None:
    for make in (partial(torch.optim.Adam, lr=0.01), partial(torch.optim.SGD, lr=0.1, momentum=0.9)):
        model = job.wrap(Tied())
        optimizer = make(model.parameters())
        train(job, model, optimizer, 4)
        assert model.module.again.weight is model.module.inner.weight
        job.see("state", state_of(optimizer))


@case()
def weights_tied_between_embedding_and_head(job: Job) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.embedding = nn.Embedding(7, 5)
            self.body = nn.Linear(5, 5)
            self.head = nn.Linear(5, 7, bias=False)
            self.head.weight = self.embedding.weight
            self.double()

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.head(torch.tanh(self.body(self.embedding(words))))
            return result

    model = job.wrap(Words())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        x, _ = job.batch(step)
        words = (x.abs() * 10).long() % 7
        loss = nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        job.see_loss(loss)


class Recomputed(nn.Module):
    """Blocks whose activations are recomputed in backward; without a stem the first block gets no input gradient."""

    def __init__(self, reentrant: bool, tail: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.stem = nn.Linear(WIDTH, 8)
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 3) if tail else nn.Identity()
        self.reentrant = reentrant
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.body:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        result: torch.Tensor = self.head(x)[:, :3]
        return result


def _recomputed(reentrant: bool, job: Job) -> None:
    for tail in (True, False):
        model = job.wrap(Recomputed(reentrant, tail))
        optimizer = sgd(model)
        train(job, model, optimizer, 3)
        optimizer.zero_grad()
        with model.no_sync():
            job.loss(model, 3).backward()
        job.loss(model, 4).backward()
        optimizer.step()


case(name="activation checkpointing, reentrant")(partial(_recomputed, True))
case(name="activation checkpointing, non-reentrant")(partial(_recomputed, False))


@case()
def activation_checkpointing_of_a_shared_layer(job: Job) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.stem = nn.Linear(WIDTH, 5)
            self.shared = nn.Linear(5, 5)
            self.head = nn.Linear(5, 3)
            self.double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for _ in range(3):
                x = checkpoint(lambda x: torch.tanh(self.shared(x)), x, use_reentrant=False)
            result: torch.Tensor = self.head(x)
            return result

    model = job.wrap(Shared())
    train(job, model, sgd(model), 4)


@case()
def recurrent_attentive_and_convolutional_layers(job: Job) -> None:
    """Layers that use other layers' parameters without calling these."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.embed = nn.Linear(1, 8)
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.recurrent = nn.LSTM(8, 4, batch_first=True)
            self.convolution = nn.Conv1d(4, 3, 2)
            self.double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            states, _ = self.recurrent(self.encoder(self.embed(x[..., None])))
            result: torch.Tensor = self.convolution(states.transpose(1, 2)).mean(-1)
            return result

    model = job.wrap(Layers())
    optimizer = sgd(model)
    for step in range(3):
        train(job, model, optimizer, 1, step)
        model.eval()  # the encoder has a fast path that reads parameters in C++
        with torch.no_grad():
            job.see_loss(job.loss(model, 40))
        model.train()


def _channels_last(fused: bool, job: Job) -> None:
    """Fused kernels pair elements by where they lie in memory, not by their indices."""
    torch.manual_seed(9)
    inner = nn.Sequential(nn.Unflatten(1, (2, 1, 3)), nn.Conv2d(2, 4, (1, 2)), nn.Flatten(), nn.Linear(8, 3))
    for p in inner.double().parameters():
        if p.dim() == 4:
            p.data = p.data.contiguous(memory_format=torch.channels_last)
    model = job.wrap(inner)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
    train(job, model, optimizer, 4)
    job.see("state", state_of(optimizer))
    train(job, model, optimizer, 2, 4)
    job.see("state after a look", state_of(optimizer))


case(name="channels last weights")(partial(_channels_last, False))
case(name="channels last weights, fused optimizer")(partial(_channels_last, True))


@case(tolerance=FEW_ULPS)
def parameters_of_two_precisions(job: Job) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(11)
            self.first = nn.Linear(WIDTH, 5).double()
            self.second = nn.Linear(5, 5)
            self.third = nn.Linear(5, 3).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.third(self.second(self.first(x).float()).double())
            return result

    # The gradients of two ranks are each rounded to single precision before they are added.
    model = job.wrap(Mixed())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        job.backward_by_rank(
            model, lambda share: nn.functional.mse_loss(model(share.x), share.y), job.shares(step)
        )
        optimizer.step()


@case()
def adversaries(job: Job) -> None:
    """A generator and a discriminator, both wrapped, with an optimizer each."""
    torch.manual_seed(8)
    maker = job.wrap(nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH)).double())
    judge = job.wrap(nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1)).double())
    make_step = torch.optim.Adam(maker.parameters(), lr=0.01, betas=(0.5, 0.9))
    judge_step = torch.optim.SGD(judge.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        x, _ = job.batch(step)
        judge_step.zero_grad()
        made = maker(x)
        (judge(made.detach()).sigmoid().mean() - judge(x).sigmoid().mean()).backward()
        judge_step.step()
        make_step.zero_grad()
        loss = -judge(made).sigmoid().mean()
        loss.backward()  # leaves gradients in the judge, too
        make_step.step()
        job.see_loss(loss)
    job.see("states", [state_of(make_step), state_of(judge_step)])


def _normalised() -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def _batch_normalisation(job: Job, **options: Any) -> None:
    """Each rank normalises by its own rows, and before a forward gets the buffers that rank 0 had after the last."""
    model = job.wrap(_normalised(), **options)
    optimizer = sgd(model)
    shared = options.get("broadcast_buffers", True)
    kept = {rank: [b.clone() for b in model.buffers()] for rank in range(job.world_size)}

    def forward(share: Share) -> torch.Tensor:
        if job.alone:
            for buffer, value in zip(model.buffers(), kept[0 if shared else share.rank], strict=True):
                buffer.copy_(value)
        loss = nn.functional.mse_loss(model(share.x), share.y)
        after[share.rank] = [b.clone() for b in model.buffers()]
        job.see(f"buffers of rank {share.rank}", after[share.rank])
        job.see(f"loss of rank {share.rank}", loss)
        return loss

    for step in range(4):
        optimizer.zero_grad()
        after: dict[int, list[torch.Tensor]] = {}
        job.backward_by_rank(model, forward, job.shares(step))
        optimizer.step()
        kept, after = after, {}
        if step % 2:
            model.eval()
            with torch.no_grad():
                for share in job.shares(20 + step):
                    forward(share)
            model.train()
            kept = after


@case(devices=[CUDA], tolerance=1e-9)
def batch_normalisation_over_all_ranks(job: Job) -> None:
    """The statistics are computed by counts and sums of ranks; torch has this for CUDA only."""
    module = _normalised()
    model = job.wrap(module if job.alone else nn.SyncBatchNorm.convert_sync_batchnorm(module))
    optimizer = sgd(model)
    train(job, model, optimizer, 4)
    job.see("buffers", list(model.buffers()))
    model.eval()
    with torch.no_grad():
        job.see_loss(job.loss(model, 40))


case(name="batch normalisation")(_batch_normalisation)
case(name="batch normalisation, buffers of one's own")(partial(_batch_normalisation, broadcast_buffers=False))


@case()
def gradients_as_bucket_views(job: Job) -> None:
    model = job.wrap(mlp(), gradient_as_bucket_view=True)
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = job.loss(model, step)
        loss.backward()
        job.see("gradients", [p.grad for p in model.parameters()])
        optimizer.step()
        job.see_loss(loss)
