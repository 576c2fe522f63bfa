"""Settings: a plan in the words of another tool, and what of the plan that tool has no words for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    """What makes ``tool`` do as a plan says, as far as it can.

    ``gist`` says in a few words what it is made to do, ``lacks`` each part of the plan that it does not do, and what it
    does instead. ``files`` are texts by name, ``arguments`` belong on a command line, ``environment`` are variables.
    ``use`` says where all of that goes.
    """

    tool: str
    gist: str
    use: str
    lacks: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether the tool does all of the plan."""
        return not self.lacks

    def sentence(self) -> str:
        """Whether the tool can run the plan, in one sentence."""
        if self.complete:
            return f"{self.tool} can run this plan: {self.gist}."
        parts = f"{len(self.lacks)} thing{'s' * (len(self.lacks) > 1)}"
        return f"{self.tool} can run this plan in part: {self.gist}; {parts} of it not."

    def to_document(self) -> dict[str, object]:
        """The fields of a JSON document."""
        return {
            "tool": self.tool,
            "complete": self.complete,
            "gist": self.gist,
            "lacks": list(self.lacks),
            "use": self.use,
            "arguments": list(self.arguments),
            "environment": dict(self.environment),
            "files": dict(self.files),
        }
