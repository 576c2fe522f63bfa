"""Defines codecs, which decide how a bucket's gradients are compressed, for live jobs and replay alike.

A codec declares the collectives of a bucket (``exchanges``, pure) and computes their operands (``reduce``). The latter
is a generator that yields every collective with its operand and receives the result. So a process group, a simulation of
all ranks in one process, and a benchmark can drive the same code.
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
"""Gradient types that codecs accept."""

MOST_EXCHANGES = 8
"""The most collectives of a bucket."""

Shape = tuple[int, ...]


class Exchange(NamedTuple):
    """One collective: its kind (``collectives.algorithms``), and the size of its tensor over all ranks.

    The size is the input of a rank for an all-reduce, the output of a rank for an all-gather, and everything that a rank
    sends (including its own part) for an all-to-all.
    """

    kind: str
    size_bytes: int


class Sent(NamedTuple):
    """A collective with this rank's operand, flat and contiguous.

    An all-reduce sums in place. The result of an all-gather has a row for each rank. The operand and the result of an
    all-to-all have a row for each rank.
    """

    kind: str
    operand: torch.Tensor


class Reduced(NamedTuple):
    """The result of a bucket's reduction; both tensors are flat.

    ``mean`` is the same on all ranks. ``kept`` is the part of this rank's gradients that was not sent, for the next step.
    """

    mean: torch.Tensor
    kept: torch.Tensor


Reduction = Generator[Sent, "torch.Tensor", Reduced]


@dataclass(slots=True)
class Gradients:
    """The input of one rank to the reduction of a bucket.

    ``flat`` is the concatenation of its gradients in type ``computed_in``, plus what was kept from earlier steps.
    ``shapes`` are their shapes; ``keys`` identify the parameters, the same on all ranks. ``memory`` is the state that the
    codec keeps for a parameter between steps, by key.
    """

    flat: torch.Tensor
    shapes: Sequence[Shape]
    keys: Sequence[int]
    rank: int
    world_size: int
    memory: dict[int, torch.Tensor] = field(default_factory=dict)


class Codec(BaseModel):
    """Compresses the gradients of a bucket. The fields are its options in a plan file.

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
        """The codecs of this class to try in a search and to measure in a probe; none by default."""
        return ()

    @property
    def permission(self) -> str:
        """The permission that the codec requires (``headway.permission``); "" for none."""
        return PRECISION if self.loses else ""

    @property
    def feeds_back(self) -> bool:
        """Whether the unsent part is kept and added to the gradients of the next step (error feedback)."""
        return bool(getattr(self, "error_feedback", False))

    @abstractmethod
    def exchanges(self, shapes: Sequence[Shape], dtype: str, world_size: int) -> tuple[Exchange, ...]:
        """The collectives of a bucket with gradients of ``shapes`` and ``dtype``, in order."""

    @abstractmethod
    def reduce(self, gradients: Gradients) -> Reduction:
        """Yield the collectives that ``exchanges`` declares, and return the mean over ranks."""

    @abstractmethod
    def describe(self) -> str:
        """The codec in a few words, for tables."""

    @property
    @abstractmethod
    def loses(self) -> str:
        """How gradients change, to follow "gradients are"; "" for a lossless codec."""

    @property
    def cost_name(self) -> str:
        """The name of the codec's cost in ``Cluster.codecs``."""
        return self.name

    @abstractmethod
    def default_us(self, size_bytes: int, world_size: int) -> tuple[float, ...]:
        """The default computation times in us: before each exchange, and after the last one.

        ``size_bytes`` is the size of the bucket's gradients. Used if the cluster has no measured cost.
        """


class FedBack(Codec):
    """A lossy codec with error feedback, which can be turned off.

    Subclasses have a field ``error_feedback``.
    """

    @property
    def cost_name(self) -> str:
        """Differs without feedback, because keeping the unsent part takes extra passes."""
        return self.name + "-alone" * (not self.feeds_back)

    @property
    def _feedback_note(self) -> str:
        return "" if self.feeds_back else " without error feedback"


def takes_all(model: ModelSpec) -> bool:
    """Whether codecs accept the types of all gradients of ``model``."""
    return all(parameter.dtype in FLOATS for parameter in model.parameters)


def computed_in(dtype: str) -> str:
    """The type in which codecs compute on gradients of ``dtype``: at least float32."""
    return "float64" if dtype == "float64" else "float32"


def element_bytes(dtype: str) -> int:
    """The element size in ``computed_in(dtype)``."""
    return DTYPE_BYTES[computed_in(dtype)]


def passes_us(size_bytes: float, passes: float) -> float:
    """The default time (us) of ``passes`` passes of one core over ``size_bytes``."""
    return passes * size_bytes / DEFAULT_BYTES_A_US


DEFAULT_BYTES_A_US = 4_000.0
"""4 GB/s: about the rate at which one core reads and writes float32 while other ranks use the same memory."""


MIB = 2**20
DEVICE_FACTOR = 250.0
"""The assumed speedup of devices with NCCL over a core: 1 TB/s instead of 4 GB/s."""


def stretches_ns(codec: Codec, cluster: Cluster, size_bytes: int, exchanges: int) -> list[int]:
    """The computation times (ns) of a bucket: before each of its exchanges, and after the last one."""
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
    """The relative slowdown of training while the codec computes; 1 if both get half of the cores.

    Without a measurement: 1 on cores that communication slows down too, and 0 elsewhere.
    """
    cost = cluster.codecs.get(codec.cost_name)
    if cost is not None:
        return cost.slowdown
    return 1.0 if cluster.compute_slowdown else 0.0
