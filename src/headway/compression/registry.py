"""The codecs there are, by name: those that come with Headway, and those of entry points of ``headway.codecs``."""

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
    shipped = {each.name: each for each in SHIPPED}
    others = load_entry_points(GROUP, shipped, _fitting, "a subclass of Codec of that name")
    return {**shipped, **{each.name: each for each in others}}


@cache
def proposed() -> tuple[Codec, ...]:
    """What a search tries, and a probe measures: the codecs that each class proposes, Headway's own first."""
    each_proposes = answers("codec", codecs().items(), _proposed)
    return tuple(chain.from_iterable(codecs_of_kind for _, codecs_of_kind in each_proposes))


def _proposed(kind: type[Codec]) -> tuple[Codec, ...]:
    """What ``kind`` proposes, which has to answer what a search asks of each."""
    made = tuple(kind.proposed())
    for each in made:
        each.describe(), each.loses, each.permission  # whether these raise
        each.exchanges(((8, 8),), "float32", 2)
        each.default_us(256, 2)
    return made


def _fitting(name: str, found: object) -> type[Codec] | None:
    if isinstance(found, type) and issubclass(found, Codec) and getattr(found, "name", "") == name:
        check_complete(found)
        return found
    return None


def _by_name(value: Any) -> Any:
    """Options with the name of their codec, ``cast`` where it is left out, as that codec."""
    if not isinstance(value, Mapping):
        return value
    name = value.get("codec", Cast.name)
    if name not in codecs():
        raise ValueError(unknown("codec", GROUP, name, codecs()))
    return codecs()[name].model_validate(dict(value))


NamedCodec = Annotated[SerializeAsAny[Codec], BeforeValidator(_by_name)]
"""A field that holds a codec: read by its name, written with all its options."""
