"""What only the user can permit: plans that change what is trained, however much faster they are."""

from __future__ import annotations

from collections.abc import Collection

from headway.errors import UserError

ASYNCHRONOUS = "asynchronous"
"""Permits strategies that change what is trained: averages of groups instead of all-reduces, averages that are late."""

LOCAL_STEPS = "local-steps"
"""Permits that each rank takes some optimizer steps on gradients of its own before models are averaged."""

PRECISION = "precision"
"""Permits plans that send less than every bit of a gradient (rounded, its largest elements, or of a low rank), or
compute with fewer digits."""

RANDOMNESS = "randomness"
"""Permits plans under which samples are made elsewhere: random augmentations differ, and data sets keep no state."""

WITHOUT_WAITING = frozenset((ASYNCHRONOUS, LOCAL_STEPS))
"""Under these ranks do not finish their steps together."""

PERMISSIONS = (ASYNCHRONOUS, LOCAL_STEPS, PRECISION, RANDOMNESS)


def check_allowed(allowed: Collection[str]) -> None:
    """Raise UserError for a permission that there is not."""
    for each in allowed:
        if each not in PERMISSIONS:
            raise UserError("there is no such permission", got=repr(each), expected=" or ".join(PERMISSIONS))


def permitted(permission: str, allowed: Collection[str]) -> bool:
    """Whether a strategy may be chosen that needs ``permission`` ("" for one that changes nothing of the training)."""
    return not permission or permission in allowed
