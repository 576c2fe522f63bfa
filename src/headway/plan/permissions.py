"""All permissions: Headway's own, and those declared by strategies, passes and codecs of other packages."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

from headway.compression.registry import codecs
from headway.errors import UserError
from headway.passes.registry import passes
from headway.permission import SHIPPED, Permission
from headway.strategies.registry import plugins


def permissions() -> dict[str, Permission]:
    """All permissions by name; if two packages declare the same one, the first in order of name counts."""
    policies = (plugin.policy for plugin in plugins().values())
    kinds = chain(policies, passes().values(), codecs().values())
    declared = {permission.name: permission for permission in SHIPPED}
    for permission in chain.from_iterable(kind.declared_permissions for kind in kinds):
        declared.setdefault(permission.name, permission)
    return declared


def check_allowed(allowed: Collection[str]) -> None:
    """Raise UserError for an unknown permission."""
    if set(allowed) <= {permission.name for permission in SHIPPED}:
        return  # without loading plug-ins
    there_are = permissions()
    for name in allowed:
        if name not in there_are:
            raise UserError("unknown permission", got=repr(name), expected=" or ".join(there_are))


def changes_in_words(names: Collection[str]) -> str:
    """The changes that these permissions allow, for the legend of a table."""
    there_are = permissions()
    return "; ".join(f"{name}: {there_are[name].changes}" for name in sorted(names) if name in there_are)
