"""What only the user can permit: plans that change what is trained, however much faster they are."""

from __future__ import annotations

from collections.abc import Collection

from headway.errors import UserError

ASYNCHRONOUS = "asynchronous"
"""Permits strategies that change what is trained: averages of groups instead of all-reduces, averages that are late."""

PERMISSIONS = (ASYNCHRONOUS,)


def check_allowed(allowed: Collection[str]) -> None:
    """Raise UserError for a permission that there is not."""
    for each in allowed:
        if each not in PERMISSIONS:
            raise UserError("there is no such permission", got=repr(each), expected=" or ".join(PERMISSIONS))


def permitted(changes_training: str, allowed: Collection[str]) -> bool:
    """Whether a strategy may be chosen that changes of the training what ``changes_training`` says ("" for nothing)."""
    return not changes_training or ASYNCHRONOUS in allowed
