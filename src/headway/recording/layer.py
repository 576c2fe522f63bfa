"""Functions laid over methods of other people's classes for as long as a recording lasts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def lay_over(owner: Any, name: str, observe: Callable[..., Any]) -> Callable[[], None]:
    """Have ``owner.name(*args)`` call ``observe(original, *args)``; returns what takes it off again."""
    original = getattr(owner, name)
    kept = vars(owner)[
        name
    ]  # a method of C++ does not bind any more where what ``getattr`` gives is put back
    watching = True

    @functools.wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:
        return observe(original, *args, **kwargs) if watching else original(*args, **kwargs)

    def take_off() -> None:
        nonlocal watching
        watching = False  # where others have laid theirs over it, it stays, and passes calls on
        if getattr(owner, name) is observed:
            setattr(owner, name, kept)

    setattr(owner, name, observed)
    return take_off
