"""What only the user can permit: plans that change what is trained, however much faster they are."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Permission:
    """What users permit with ``--allow name``: that training changes as ``changes`` says, in a short clause.

    Strategies, passes and codecs of other packages declare new ones (``declared_permissions``).
    """

    name: str
    changes: str


ASYNCHRONOUS = "asynchronous"
LOCAL_STEPS = "local-steps"
PRECISION = "precision"
RANDOMNESS = "randomness"

SHIPPED = (
    Permission(ASYNCHRONOUS, "ranks train on averages that are late, or are of some ranks alone"),
    Permission(LOCAL_STEPS, "ranks take some optimizer steps by themselves before models are averaged"),
    Permission(PRECISION, "gradients are compressed, or computation has fewer digits"),
    Permission(RANDOMNESS, "random numbers are drawn elsewhere, such as by loaders with workers"),
)


def permitted(needed: Collection[str], allowed: Collection[str]) -> bool:
    """Whether a user who has ``allowed`` some permissions may be given what needs all of ``needed``."""
    return set(needed) <= set(allowed)
