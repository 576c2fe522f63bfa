"""Settings: a plan in the words of another tool, and what of the plan that tool has no words for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    """What makes ``tool`` do as a plan says, as far as it can.

    ``gist`` says in a few words what it is made to do, ``lacks`` each part of the plan that it does not do, and what it
    does instead; ``cautions`` are what these settings do besides. ``files`` are texts by name, ``arguments`` belong on
    a command line, ``environment`` are variables, and ``use`` says where all of that goes. ``part`` is what the tool is
    for.
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
        """Whether the tool does all that it is for."""
        return not self.lacks

    def sentence(self) -> str:
        """Whether the tool can do as the plan says, in one sentence."""
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
