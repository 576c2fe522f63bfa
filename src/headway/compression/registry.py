"""Registers codecs by name: Headway's own, and those from entry points of ``headway.codecs``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import chain
from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny

from headway.compression.cast import Cast
from headway.compression.codec import Codec
from headway.compression.int8 import Int8
from headway.compression.power_sgd import PowerSGD
from headway.compression.top_k import TopK
from headway.plugins import answers, check_complete, load_entry_points, unknown

GROUP = "headway.codecs"
SHIPPED: tuple[type[Codec], ...] = (Cast, Int8, TopK, PowerSGD)


@cache
def codecs() -> dict[str, type[Codec]]:
    """All codecs by name."""
    shipped = {kind.name: kind for kind in SHIPPED}
    plugins = load_entry_points(GROUP, shipped, _fitting, "a subclass of Codec of that name")
    return {**shipped, **{kind.name: kind for kind in plugins}}


@cache
def proposed() -> tuple[Codec, ...]:
    """The codecs to try in a search and to measure in a probe, Headway's own first."""
    by_kind = answers("codec", codecs().items(), _proposed)
    return tuple(chain.from_iterable(codecs_of_kind for _, codecs_of_kind in by_kind))


def _proposed(kind: type[Codec]) -> tuple[Codec, ...]:
    """The codecs that ``kind`` proposes, after a check that they answer the questions of a search."""
    proposals = tuple(kind.proposed())
    for proposal in proposals:
        proposal.describe(), proposal.loses, proposal.permission  # check that these do not raise
        proposal.exchanges(((8, 8),), "float32", 2)
        proposal.default_us(256, 2)
    return proposals


def _fitting(name: str, loaded: object) -> type[Codec] | None:
    if isinstance(loaded, type) and issubclass(loaded, Codec) and getattr(loaded, "name", "") == name:
        check_complete(loaded)
        return loaded
    return None


def _by_name(value: Any) -> Any:
    """Turn a mapping of options into its codec (default: ``cast``)."""
    if not isinstance(value, Mapping):
        return value
    name = value.get("codec", Cast.name)
    if name not in codecs():
        raise ValueError(unknown("codec", GROUP, name, codecs()))
    return codecs()[name].model_validate(dict(value))


NamedCodec = Annotated[SerializeAsAny[Codec], BeforeValidator(_by_name)]
"""A field that holds a codec: read by its name, written with all its options."""
