"""Names of torch that are not public are used in one folder."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import headway

ROOT = Path(headway.__file__).parent
ADAPTER = Path("torch_private")
OF_MODULES = {"_parameters", "_buffers", "_modules"}  # also names of our own
OF_PYTHON = {"_asdict", "_replace", "_fields", "_field_defaults", "_exit", "_getframe", "_Decompress"}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _private_imports(tree: ast.Module) -> set[str]:
    return {
        name
        for name in _imported(tree)
        if name.split(".")[0] == "torch" and any(_is_private(part) for part in name.split("."))
    }


def _private_attributes(tree: ast.Module) -> set[str]:
    """Private attributes of other objects than the method's own."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and _is_private(node.attr)
        and not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"})
    }


def _private_strings(tree: ast.Module) -> set[str]:
    """Private names that are asked for as strings."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) > 1)
    named = (
        call.args[1]
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in {"getattr", "hasattr", "setattr", "delattr"}
    )
    return {
        str(name.value) for name in named if isinstance(name, ast.Constant) and _is_private(str(name.value))
    }


def _own_names(tree: ast.Module) -> set[str]:
    """Methods and attributes that classes of this file define."""
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            own.add(node.attr)
    return own


def test_private_names_of_torch_are_used_in_one_folder() -> None:
    trees = {path.relative_to(ROOT): ast.parse(path.read_text("utf-8")) for path in ROOT.rglob("*.py")}
    adapters = [trees.pop(path) for path in list(trees) if path.parent == ADAPTER]
    own = OF_PYTHON.union(*(_own_names(tree) for tree in trees.values())) - OF_MODULES
    found = {
        path: names
        for path, tree in trees.items()
        if (names := _private_imports(tree) | ((_private_attributes(tree) | _private_strings(tree)) - own))
    }
    assert found == {}
    assert any(map(_private_strings, adapters)), "nothing was found where there is something"
    assert any(map(_private_imports, adapters)), "nothing was found where there is something"
