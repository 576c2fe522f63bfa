"""The commands that the documentation shows, as they stand there."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
PROGRAM = re.compile(r"(?:[A-Z_]+=\S+ )*(headway|torchrun|python|srun|pip|make|git|source|cp|sed) ")


@dataclass(frozen=True, slots=True)
class Documented:
    """One command of a page: where it stands, and its text without the comment behind it."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"

    @property
    def words(self) -> list[str]:
        """The words of the command, as a shell splits them."""
        return shlex.split(self.text)


def commands_of(page: Path) -> list[Documented]:
    """The shell commands in the code blocks of ``page``, in order; lines ending in a backslash are joined."""
    commands: list[Documented] = []
    language: str | None = None
    start, text = 0, ""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            language = (line[3:].strip() or "text") if language is None else None
            continue
        in_shell = language in ("bash", "sh") if language else line.startswith("    ")
        if not in_shell:
            continue
        if not text:
            start = number
        text += line.strip().removeprefix("$ ")
        if text.endswith("\\"):
            text = text[:-1]
            continue
        text = re.sub(r"\s+#\s.*$", "", text)
        if PROGRAM.match(f"{text} "):
            commands.append(Documented(str(page.relative_to(ROOT)), start, text))
        text = ""
    return commands


def headway_parts(command: Documented) -> list[list[str]]:
    """The arguments of every ``headway`` in ``command``: launchers may stand before it, and another after ``--``."""
    parts: list[list[str]] = []
    words = command.words
    while "headway" in words:
        words = words[words.index("headway") + 1 :]
        end = words.index("--") if "--" in words else len(words)
        parts.append(words[:end])
        words = words[end:]
    return parts
