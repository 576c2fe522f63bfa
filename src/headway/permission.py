"""Permissions: plans that change what is trained are used only if the user permits it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Permission:
    """A permission for ``--allow name``; ``changes`` says in a short clause how training changes.

    Strategies, passes and codecs of other packages declare new ones (``declared_permissions``).
    """

    name: str
    changes: str


ASYNCHRONOUS = "asynchronous"
LOCAL_STEPS = "local-steps"
PRECISION = "precision"
RANDOMNESS = "randomness"

SHIPPED = (
    Permission(ASYNCHRONOUS, "ranks train on stale averages, or on averages over some of the ranks"),
    Permission(LOCAL_STEPS, "ranks take local optimizer steps between averages of their models"),
    Permission(PRECISION, "gradients are compressed, or computation has lower precision"),
    Permission(RANDOMNESS, "random numbers are drawn elsewhere, such as in data loader workers"),
)


def permitted(needed: Collection[str], allowed: Collection[str]) -> bool:
    """Whether the ``allowed`` permissions include all that are ``needed``."""
    return set(needed) <= set(allowed)
