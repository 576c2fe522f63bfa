"""Cases of throughput and of time to a loss: which job on which imitated network, and what is not as it should be."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property

from decentralised_training.methods import HOSTS, PER_HOST
from headway.lab.spec import LabSpec, parse_spec
from headway.models.catalogue import MODELS
from headway.models.convolutional import ConvolutionalBuilder, Feature
from headway.models.roofline import modelled, step_s
from headway.models.table import FLOAT_BYTES, Layer, LayerTable, Parameter, Work

GTX_1080_TI = modelled("GTX 1080 Ti", 11.34e12, 484e9)
TCP_SHARE = 0.956  # of a shaped link's rate that Gloo's payload gets
MOST_BYTES = 2e6  # of a scaled model: sixteen workers share two cores
MOST_LAYERS = 20  # each costs a worker CPU time, which its sleeping device is not to wait for
COMPUTE_S, QUICK_COMPUTE_S = 0.8, 0.3
SLOW_RANK, SLOW_HOST = 5, 1
SLOW_LINK = 0.2  # of the rate that the other hosts' links have
FACTORS = 24  # iterations after which random slowdowns repeat
SLOW_SHARE, SLOW_TIMES = 0.1, 4.0


@dataclass(frozen=True)
class Network:
    """A network that is imitated: the goodput of a host's link, which its workers share."""

    name: str
    goodput_bytes_per_s: float
    words: str


NETWORKS = {
    each.name: each
    for each in (
        Network("ib56", 0.9 * 54.5e9 / 8, "InfiniBand FDR, 54.5 Gbit/s, 0.9 of it goodput"),
        Network("10gbe", 0.94 * 10e9 / 8, "10 Gbit/s Ethernet, 0.94 of it goodput"),
    )
}


def vgg16_cifar(samples: int = 128) -> LayerTable:
    """VGG-16 for ten classes and images of 32 x 32: its convolutions, and dense layers of 512."""
    net = ConvolutionalBuilder(samples)
    x, index = Feature(3, 32, 32), 0
    for channels, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            x = net.cut(
                net.activation(net.convolution(f"features.{index}", x, channels, 3, padding=1, bias=True))
            )
            index += 2
        x = net.cut(net.pool(x, 2, stride=2))
        index += 1
    for name, inputs, outputs in (("0", x.numel, 512), ("3", 512, 512), ("6", 512, 10)):
        net.linear(f"classifier.{name}", inputs, outputs)
    return net.table("VGG-16", f"{samples} images of 32 x 32")


def merged(table: LayerTable, most: int) -> LayerTable:
    """The table with ``most`` layers of one parameter each, where it has more: neighbours are taken together.

    Work and parameters stay what they are. Each layer has about as much of the whole, by half its work and half its
    parameters.
    """
    if len(table.layers) <= most:
        return table
    whole_s = step_s(table, GTX_1080_TI)[0]
    passed, groups = 0.0, [list[Layer]() for _ in range(most)]
    for layer in table.layers:
        numel = sum(parameter.numel for parameter in layer.parameters)
        share = (GTX_1080_TI.forward_s(layer.work) / whole_s + numel / table.parameter_count) / 2
        groups[min(most - 1, int((passed + share / 2) * most))].append(layer)
        passed += share
    layers = tuple(_as_one(index, group) for index, group in enumerate(group for group in groups if group))
    return LayerTable(table.name, table.batch, table.samples, layers)


def _as_one(index: int, layers: list[Layer]) -> Layer:
    numel = sum(parameter.numel for layer in layers for parameter in layer.parameters)
    work = sum((layer.work for layer in layers), Work())
    return Layer(f"layers.{index}", (Parameter("weight", (numel,)),), work)


@dataclass(frozen=True)
class Situation:
    """What is unequal: one worker, one link, or iterations by chance."""

    name: str
    words: str
    slow_times: float = 1.0
    slow_link: float = 1.0
    by_chance: bool = False

    def factor(self, rank: int, iteration: int, slow_rank: int = SLOW_RANK) -> float:
        """How many times as long an iteration of a rank takes."""
        if self.by_chance:
            drawn = random.Random(1_000_003 * rank + iteration % FACTORS).random()
            return SLOW_TIMES if drawn < SLOW_SHARE else 1.0
        return self.slow_times if rank == slow_rank else 1.0

    def lab(self, hosts: int, workers_per_host: int, rate_mbit: float) -> LabSpec:
        """The lab's spec."""
        rates = [rate_mbit * (self.slow_link if host == SLOW_HOST else 1.0) for host in range(hosts)]
        listed = [{"name": f"host{n}", "rate": f"{rate:g}mbit"} for n, rate in enumerate(rates)]
        return parse_spec({"hosts": listed, "workers_per_host": workers_per_host})


SITUATIONS = {
    each.name: each
    for each in (
        Situation("homogeneous", "all alike"),
        Situation("slow2", f"rank {SLOW_RANK} computes twice as long", slow_times=2.0),
        Situation("slow5", f"rank {SLOW_RANK} computes five times as long", slow_times=5.0),
        Situation(
            "slowlink", f"the link of host {SLOW_HOST} has {SLOW_LINK:.0%} of the rate", slow_link=SLOW_LINK
        ),
        Situation(
            "random", f"{SLOW_SHARE:.0%} of iterations, by chance, take {SLOW_TIMES:g} times as long", by_chance=True
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class PacedPlan:
    """How a case is run. ``ratio`` is one model over a host's link against a step's computation, as imitated."""

    shrink: int
    dilation: float
    rate_mbit: float
    ratio: float


@dataclass(frozen=True)
class ThroughputCase:
    """A paced model on an imitated network, 4 workers on each of 4 hosts."""

    situation: Situation
    model: str
    network: Network
    hosts: int = HOSTS
    workers_per_host: int = PER_HOST

    @property
    def name(self) -> str:
        return f"{self.situation.name}-{self.model}-{self.network.name}"

    @property
    def world_size(self) -> int:
        return self.hosts * self.workers_per_host

    @cached_property
    def table(self) -> LayerTable:
        """The model's layers, of large models as many as ``MOST_LAYERS``."""
        return merged(vgg16_cifar() if self.model == "vgg16" else MODELS[self.model](), MOST_LAYERS)

    def plan(self, *, quick: bool) -> PacedPlan:
        """Sizes and rates scaled together, so that the ratio of communication to computation holds."""
        compute_s = sum(step_s(self.table, GTX_1080_TI))
        size_bytes = self.table.parameter_count * FLOAT_BYTES
        ratio = size_bytes / self.network.goodput_bytes_per_s / compute_s
        wanted_s = QUICK_COMPUTE_S if quick else COMPUTE_S
        shrink = 1
        while size_bytes / shrink > MOST_BYTES:
            shrink *= 2
        rate_mbit = size_bytes / shrink / (ratio * wanted_s) / TCP_SHARE * 8e-6
        return PacedPlan(shrink, wanted_s / compute_s, round(rate_mbit, 1), ratio)


THROUGHPUT = {
    case.name: case
    for network in NETWORKS.values()
    for model in ("vgg16", "resnet50")
    for situation in SITUATIONS.values()
    for case in (ThroughputCase(situation, model, network),)
}
QUICK_THROUGHPUT = "slow5-vgg16-ib56"
