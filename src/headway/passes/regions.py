"""Regions of a model: a module with all that lies within it, by its path."""

from __future__ import annotations

from collections.abc import Iterable

from headway.errors import UnsupportedError
from headway.model import ModelSpec


def lies_in(module: str, region: str) -> bool:
    """Whether ``module`` is ``region`` or lies within it."""
    return module == region or module.startswith(region + ".")


def check_apart(regions: tuple[str, ...]) -> tuple[str, ...]:
    """``regions`` themselves. Raises ValueError where one is the whole model, comes twice or lies within another."""
    for one in regions:
        if not one or regions.count(one) > 1 or any(lies_in(one, other) for other in regions if other != one):
            raise ValueError(f"{one!r} is given twice, lies within another, or is the whole model")
    return regions


def check_trained(regions: Iterable[str], model: ModelSpec) -> None:
    """Raise UnsupportedError for one in which ``model`` trains no parameter."""
    for region in regions:
        if not any(lies_in(each.module, region) for each in model.parameters):
            raise UnsupportedError(
                "there is no module of that name that trains parameters", got=repr(region),
                expected="the path of a module in the wrapped model",
            )  # fmt: skip


def region_of(module: str, regions: Iterable[str]) -> str:
    """The region that ``module`` lies in; "" for none."""
    return next((region for region in regions if lies_in(module, region)), "")


def in_few_words(regions: tuple[str, ...]) -> str:
    """The only one of ``regions``, or how many they are."""
    return regions[0] if len(regions) == 1 else f"{len(regions)} modules"
