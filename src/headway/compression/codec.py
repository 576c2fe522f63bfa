"""Codec: what a bucket's gradients are sent as, decided once, for the live driver and for replay alike.

A codec says which collectives a bucket takes (``exchanges``, pure) and computes what they carry (``reduce``). The
latter is a generator: it yields every collective with its operand and is sent the result, so that a process group, a
simulation of all ranks in one process and a measurement of what computing takes can all drive the same code.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict

from headway.cluster import Cluster
from headway.collectives.algorithms import NCCL
from headway.model import DTYPE_BYTES, ModelSpec
from headway.permission import PRECISION, Permission
from headway.plugins import API_VERSION, asking

if TYPE_CHECKING:
    import torch


FLOATS = ("float64", "float32", "float16", "bfloat16")
"""Types of gradients that codecs take."""

MOST_EXCHANGES = 8
"""So many collectives a bucket has at most."""

Shape = tuple[int, ...]


class Exchange(NamedTuple):
    """One collective: its kind (``collectives.algorithms``), and the size of its tensor over all ranks.

    That of an all-reduce is what every rank brings, that of an all-gather what every rank ends with, that of an
    all-to-all what every rank sends and receives, its own part among it.
    """

    kind: str
    size_bytes: int


class Sent(NamedTuple):
    """A collective with this rank's operand, flat and contiguous.

    The result of an all-reduce is the sum, in the operand's place. That of an all-gather has a row for each rank. An
    all-to-all's operand has a row for each rank, and so has its result.
    """

    kind: str
    operand: torch.Tensor


class Reduced(NamedTuple):
    """What a bucket's reduction ends with, both flat.

    ``mean`` is the same on all ranks. ``kept`` is what of this rank's gradients is not in it, for the next step.
    """

    mean: torch.Tensor
    kept: torch.Tensor


Reduction = Generator[Sent, "torch.Tensor", Reduced]


@dataclass(slots=True)
class Gradients:
    """What one rank brings to the reduction of a bucket.

    ``flat`` has its gradients behind each other, in ``computed_in`` of their type, what was kept of earlier steps
    added. ``shapes`` are their shapes, and ``keys`` tell the parameters apart, the same on all ranks. ``memory`` is
    what the codec remembers of a parameter from one step to the next, by its key.
    """

    flat: torch.Tensor
    shapes: Sequence[Shape]
    keys: Sequence[int]
    rank: int
    world_size: int
    memory: dict[int, torch.Tensor] = field(default_factory=dict)


class Codec(BaseModel):
    """How the gradients of a bucket are sent. Its fields are the options in a plan file.

    Subclasses have a field ``codec`` with their name as the only value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    api_version: ClassVar[int] = API_VERSION
    """The version of ``headway.ext`` that it was written for; a package that says so is refused by another one."""

    declared_permissions: ClassVar[tuple[Permission, ...]] = ()
    """New permissions that it may need: users give them by these names, and are told what they change."""

    @classmethod
    def proposed(cls) -> tuple[Self, ...]:
        """The codecs of this class that a search tries, and whose costs a probe measures; none by default."""
        return ()

    @property
    def permission(self) -> str:
        """The permission without which it is never chosen (``headway.permission``); "" for none."""
        return PRECISION if self.loses else ""

    @property
    def feeds_back(self) -> bool:
        """Whether what is not sent is kept and added to the gradients of the next step."""
        return bool(getattr(self, "error_feedback", False))

    @abstractmethod
    def exchanges(self, shapes: Sequence[Shape], dtype: str, world_size: int) -> tuple[Exchange, ...]:
        """The collectives of a bucket with gradients of ``shapes`` and ``dtype``, in their order."""

    @abstractmethod
    def reduce(self, gradients: Gradients) -> Reduction:
        """Yield the collectives that ``exchanges`` says, and return the mean over ranks."""

    @abstractmethod
    def describe(self) -> str:
        """Say what gradients are sent as in a few words, for tables."""

    @property
    @abstractmethod
    def loses(self) -> str:
        """What becomes of gradients, in words that follow "gradients are"; "" where all of every gradient is sent."""

    @property
    def cost_name(self) -> str:
        """The name under which ``Cluster.codecs`` holds what it costs."""
        return self.name

    @abstractmethod
    def default_us(self, size_bytes: int, world_size: int) -> tuple[float, ...]:
        """What computing takes where nothing was measured: before each exchange, and behind the last one.

        ``size_bytes`` is the size of the bucket's gradients. Buckets with fewer exchanges have fewer of these, the last
        one always.
        """


class FedBack(Codec):
    """A codec that loses so much of a gradient that it keeps this for the next step, unless it is told not to.

    Subclasses have a field ``error_feedback``.
    """

    @property
    def cost_name(self) -> str:
        """Two: keeping what is not sent takes passes of its own."""
        return self.name + "-alone" * (not self.feeds_back)

    @property
    def _said_of_feedback(self) -> str:
        return "" if self.feeds_back else " without error feedback"


def takes_all(model: ModelSpec) -> bool:
    """Whether all gradients of ``model`` are of types that codecs take."""
    return all(parameter.dtype in FLOATS for parameter in model.parameters)


def computed_in(dtype: str) -> str:
    """The type in which codecs compute on gradients of ``dtype``: no less than float32."""
    return "float64" if dtype == "float64" else "float32"


def element_bytes(dtype: str) -> int:
    """The size of an element that codecs compute on, of gradients of ``dtype``."""
    return DTYPE_BYTES[computed_in(dtype)]


def passes_us(size_bytes: float, passes: float) -> float:
    """What so many passes of one core over ``size_bytes`` take, where nothing was measured."""
    return passes * size_bytes / DEFAULT_BYTES_A_US


DEFAULT_BYTES_A_US = 4_000.0
"""4 GB/s: one core reads and writes float32 at about this rate where other ranks use the same memory."""


MIB = 2**20
DEVICE_FACTOR = 250.0
"""By how much a device whose library is NCCL is taken to compute faster than a core: 1 TB/s instead of 4 GB/s."""


def stretches_ns(codec: Codec, cluster: Cluster, size_bytes: int, exchanges: int) -> list[int]:
    """What a bucket of ``size_bytes`` takes to compute: before each of its exchanges, and behind the last one."""
    cost = cluster.codecs.get(codec.cost_name)
    if cost is None:
        factor = 1.0 if cluster.library != NCCL else 1 / DEVICE_FACTOR
        with asking("codec", codec):
            each_us = [us * factor for us in codec.default_us(size_bytes, cluster.world_size)]
    else:
        pairs = zip(cost.bucket_us, cost.mib_us, strict=True)
        each_us = [bucket_us + mib_us * size_bytes / MIB for bucket_us, mib_us in pairs]
    return [round(us * 1e3) for us in (*each_us[:-1][:exchanges], each_us[-1])]


def slowdown_of(codec: Codec, cluster: Cluster) -> float:
    """How much longer training's computation takes while that is computed; 1 where both have half of the cores.

    Where it was not measured: 1 on cores that communication slows down too, and nothing elsewhere.
    """
    cost = cluster.codecs.get(codec.cost_name)
    if cost is not None:
        return cost.slowdown
    return 1.0 if cluster.compute_slowdown else 0.0
