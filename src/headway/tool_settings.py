"""Settings: a plan as settings for another tool, and the parts of it that the tool cannot express."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    """Settings that make ``tool`` follow a plan, as far as it can.

    ``gist`` says in a few words what they do; ``lacks`` are the parts of the plan that the tool cannot follow, and what
    it does instead; ``cautions`` are side effects. ``files`` are texts by name, ``arguments`` belong on a command line,
    ``environment`` are variables, and ``use`` says where all of these go. ``part`` is the task of the tool.
    """

    tool: str
    gist: str
    use: str
    lacks: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    part: str = "run this plan"

    @property
    def complete(self) -> bool:
        """Whether the tool can do its whole task."""
        return not self.lacks

    def sentence(self) -> str:
        """One sentence on how far the tool can follow the plan."""
        if self.complete:
            return f"{self.tool} can {self.part}: {self.gist}."
        left = "1 thing is" if len(self.lacks) == 1 else f"{len(self.lacks)} things are"
        return f"{self.tool} can {self.part} in part: {self.gist}; {left} left out."

    def to_document(self) -> dict[str, object]:
        """The fields of a JSON document."""
        return {
            "tool": self.tool,
            "complete": self.complete,
            "gist": self.gist,
            "lacks": list(self.lacks),
            "cautions": list(self.cautions),
            "use": self.use,
            "arguments": list(self.arguments),
            "environment": dict(self.environment),
            "files": dict(self.files),
        }
