"""The permissions there are: Headway's own, and those that strategies, passes and codecs of other packages declare."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

from headway.compression.registry import codecs
from headway.errors import UserError
from headway.passes.registry import passes
from headway.permission import SHIPPED, Permission
from headway.strategies.registry import plugins


def permissions() -> dict[str, Permission]:
    """All permissions by name; where two packages declare one, the first in the order of names counts."""
    policies = (plugin.policy for plugin in plugins().values())
    kinds = chain(policies, passes().values(), codecs().values())
    found = {each.name: each for each in SHIPPED}
    for each in chain.from_iterable(kind.declared_permissions for kind in kinds):
        found.setdefault(each.name, each)
    return found


def check_allowed(allowed: Collection[str]) -> None:
    """Raise UserError for a permission that there is not."""
    if set(allowed) <= {each.name for each in SHIPPED}:
        return  # without loading what other packages bring
    there_are = permissions()
    for name in allowed:
        if name not in there_are:
            raise UserError("there is no such permission", got=repr(name), expected=" or ".join(there_are))


def changes_in_words(names: Collection[str]) -> str:
    """What these permissions allow, for the foot of a table."""
    there_are = permissions()
    return "; ".join(f"{name}: {there_are[name].changes}" for name in sorted(names) if name in there_are)
