"""All: whoever is there averages together, as all-reduce has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from headway.coordination.generator import Worker
from headway.coordination.generators.attendance import Attendance
from headway.coordination.generators.options import GeneratorOptions


class Everyone(Attendance[GeneratorOptions]):
    """One group of all workers, as soon as all of them wait. Who joins in between is waited for too."""

    name: ClassVar[str] = "all"

    def _drawn_now(self, now_ns: int) -> Iterator[Sequence[Worker]]:
        del now_ns
        if self.present and all(map(self._is_ready, self.present)):
            yield tuple(self.present)
