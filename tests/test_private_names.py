"""Names of torch that are not public are used in one file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import headway

ROOT = Path(headway.__file__).parent
ADAPTER = Path("torch_private.py")
DECOUPLED = Path("strategies/data_parallel/decoupled")
LEFT = {DECOUPLED / name for name in ("checks.py", "copying.py", "parameter_state.py", "prehook.py")}
"""Files that still use such names. It only ever gets shorter."""
OF_MODULES = {"_parameters", "_buffers", "_modules"}  # also names of our own
OF_PYTHON = {"_replace", "_fields", "_field_defaults", "_exit", "_getframe", "_Decompress"}


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


def test_private_names_of_torch_are_used_in_one_file() -> None:
    trees = {path.relative_to(ROOT): ast.parse(path.read_text("utf-8")) for path in ROOT.rglob("*.py")}
    adapter = trees.pop(ADAPTER)
    own = OF_PYTHON.union(*(_own_names(tree) for tree in trees.values())) - OF_MODULES
    found = {
        path: names
        for path, tree in trees.items()
        if (names := _private_imports(tree) | (_private_attributes(tree) - own))
    }
    assert {path: names for path, names in found.items() if path not in LEFT} == {}
    assert set(found) == LEFT, "these use none any more: take them off the list"
    assert _private_imports(adapter), "nothing was found where there is something"
