"""Checks the shape of the package: sizes of files, names, who imports strategies, and the map of the folders.

``python tools/house.py`` prints the counts and fails where one exceeds its limit in ``pyproject.toml``
(``[tool.house]``). Limits may only fall: a change that needs more says why in its commit.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "headway"
SMALL, LARGE = 40, 700  # lines of a file
LONELY = 100  # lines below which a file with a single importer must say why it is one
VAGUE = {
    "each", "one", "own", "found", "said", "made", "given", "other", "others", "whole", "mine", "known", "asked", "told"
}  # fmt: skip
"""Names that do not say what a thing is."""
SHARED_ROOMS = {"live"}  # folders of strategies/ that are no strategy


@dataclass(frozen=True)
class Module:
    """A file of the package: its dotted name, its lines, and its syntax tree."""

    name: str
    path: Path
    lines: int
    tree: ast.Module

    @property
    def room(self) -> str:
        """The dotted name of its folder."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return (ast.get_docstring(self.tree) or "").partition("\n")[0]


def modules() -> dict[str, Module]:
    """All files of the package by their dotted names."""
    files = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        text = path.read_text()
        files[name] = Module(name, path, text.count("\n"), ast.parse(text))
    return files


def imports(module: Module, names: dict[str, Module]) -> Iterator[str]:
    """The files of the package that ``module`` imports anywhere, for types too."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if (target := inner if inner in names else node.module) in names:
                    yield target
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)


def bound_names(module: Module) -> Iterator[tuple[str, int]]:
    """Names that ``module`` binds (variables, parameters, functions, classes), with their lines."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def strategy_rooms() -> set[str]:
    """The dotted names of the folders that hold one strategy each."""
    folders = (path.parent for path in (PACKAGE / "strategies").glob("*/__init__.py"))
    return {f"headway.strategies.{folder.name}" for folder in folders if folder.name not in SHARED_ROOMS}


def complaints(names: dict[str, Module]) -> dict[str, list[str]]:
    """What breaks each rule, by the rule's name in ``[tool.house]``."""
    importers: dict[str, set[str]] = defaultdict(set)
    concrete: list[str] = []
    rooms = strategy_rooms()
    for module in names.values():
        for target in set(imports(module, names)):
            importers[target].add(module.name)
            inside = next((room for room in rooms if target == room or target.startswith(f"{room}.")), None)
            if inside and not module.name.startswith("headway.strategies."):
                concrete.append(f"{module.name} imports {target}")
    files = [module for module in names.values() if module.path.name != "__init__.py"]
    vague = [
        f"{module.path.relative_to(ROOT)}:{line} {name}"
        for module in names.values()
        for name, line in bound_names(module)
        if name.strip("_") in VAGUE
    ]
    return {
        "files": [module.name for module in names.values()],
        "lines": [module.name for module in names.values() for _ in range(module.lines)],
        "small_files": [f"{module.name}: {module.lines} lines" for module in files if module.lines < SMALL],
        "large_files": [f"{module.name}: {module.lines} lines" for module in files if module.lines > LARGE],
        "lonely_files": [
            f"{module.name}: {module.lines} lines, imported by {next(iter(importers[module.name]))} alone"
            for module in files
            if module.lines < LONELY
            and len(importers[module.name]) == 1
            and names[next(iter(importers[module.name]))].room == module.room
        ],
        "vague_names": vague,
        "concrete_strategies": concrete,
        "unmapped_folders": unmapped(names),
    }


def unmapped(names: dict[str, Module]) -> list[str]:
    """Folders that ``docs/architecture.md`` does not draw, and folders that it draws and that do not exist."""
    drawn = set(
        re.findall(r"^ {2,}([a-z_]+(?:/[a-z_]+)*)/ ", (ROOT / "docs/architecture.md").read_text(), re.M)
    )
    real = {str(module.path.parent.relative_to(PACKAGE)) for module in names.values()} - {"."}
    return [f"not drawn: {folder}" for folder in sorted(real - drawn)] + [
        f"does not exist: {folder}" for folder in sorted(drawn - real)
    ]


def main() -> None:
    """Print the counts, and what exceeds its limit."""
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["house"]
    broken = complaints(modules())
    exceeded = {rule: places for rule, places in broken.items() if len(places) > limits[rule]}
    print(
        ", ".join(
            f"{rule.replace('_', ' ')} {len(found):,} (limit {limits[rule]:,})"
            for rule, found in broken.items()
        )
    )
    for rule, found in exceeded.items():
        shown = found if "--all" in sys.argv or rule not in ("files", "lines") else []
        print(
            f"\n{rule.replace('_', ' ')}: {len(found)}, and the limit is {limits[rule]}",
            *shown[:200],
            sep="\n  ",
        )
    if exceeded:
        sys.exit(1)


if __name__ == "__main__":
    main()
