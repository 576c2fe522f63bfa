"""Generators by name, for the coordinator of a job and for its replay."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headway import files
from headway.coordination.generator import GroupGenerator, Worker
from headway.coordination.generators.at_random import RandomGroups
from headway.coordination.generators.attendance import Attendance
from headway.coordination.generators.everyone import Everyone
from headway.coordination.generators.first_come import FirstCome
from headway.coordination.generators.global_division import GlobalDivision
from headway.coordination.generators.group_buffer import GroupBuffer
from headway.coordination.generators.inter_intra import InterIntra
from headway.coordination.generators.options import (
    DrawingOptions,
    FirstComeOptions,
    GeneratorOptions,
    PairOptions,
    SizeOptions,
)
from headway.coordination.generators.pairs import Pairs
from headway.errors import PlanError

_KNOWN: Mapping[str, tuple[type[Attendance[Any]], type[GeneratorOptions]]] = MappingProxyType(
    {
        FirstCome.name: (FirstCome, FirstComeOptions),
        GlobalDivision.name: (GlobalDivision, DrawingOptions),
        InterIntra.name: (InterIntra, DrawingOptions),
        GroupBuffer.name: (GroupBuffer, DrawingOptions),
        RandomGroups.name: (RandomGroups, SizeOptions),
        Pairs.name: (Pairs, PairOptions),
        Everyone.name: (Everyone, GeneratorOptions),
    }
)


def names() -> tuple[str, ...]:
    """The names of all generators."""
    return tuple(_KNOWN)


def options_of(name: str, options: Mapping[str, Any]) -> GeneratorOptions:
    """``options`` as those of the generator ``name``, with defaults. Raises PlanError for what it does not know."""
    if name not in _KNOWN:
        raise PlanError("there is no such generator of groups", got=repr(name), expected=" or ".join(_KNOWN))
    return files.validate(dict(options), _KNOWN[name][1], PlanError, f"groups {name}")


def generator_of(
    name: str, options: Mapping[str, Any], hosts: Mapping[Worker, str], seed: int
) -> GroupGenerator:
    """A new generator, without workers; ``hosts`` says which host each worker is on, and may grow.

    A worker that is not in ``hosts`` is taken to be on a host of its own. Raises PlanError as ``options_of`` does.
    """
    validated = options_of(name, options)
    return _KNOWN[name][0](validated, hosts, seed)
