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
from headway.errors import PluginError
from headway.plugins import load_entry_points, unknown

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
    """What a search tries, and a probe measures: the codecs that each class proposes, Headway's own first.

    Raises PluginError for a class of another package that fails to.
    """
    return tuple(chain.from_iterable(map(_proposed_by, codecs().values())))


def _proposed_by(kind: type[Codec]) -> tuple[Codec, ...]:
    try:
        return kind.proposed()
    except Exception as error:  # whatever a foreign package raises is its own fault
        raise PluginError(
            f"the codec {kind.name} cannot say what it proposes", got=f"{type(error).__name__}: {error}",
            expected=f"codecs from {kind.__module__}.{kind.__qualname__}.proposed",
            fix="Mend or uninstall the package that brings it.",
        ) from error  # fmt: skip


def _fitting(name: str, found: object) -> type[Codec] | None:
    if isinstance(found, type) and issubclass(found, Codec) and getattr(found, "name", "") == name:
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
