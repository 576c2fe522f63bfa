"""A driver that has stock DDP and both decoupled forms take turns, a step each."""

from __future__ import annotations

from dataclasses import replace

from headway.scheduling.buckets import BucketSchedule
from headway.strategies.adaptive.counting import StepCount, Study, Tunable


class Turns(StepCount):
    """Changes what is in force at every step: stock DDP, parameters gathered, stock DDP, gradients gathered."""

    def __init__(self, wrapped: Tunable) -> None:
        super().__init__(wrapped)
        self._number = 0
        self._begin(wrapped)

    def _made_study(self) -> Study:
        while True:
            yield
            self._take_turn(self._model())

    def _take_turn(self, wrapped: Tunable) -> None:
        if wrapped.is_stock:
            self._put(
                wrapped,
                replace(wrapped.schedule, gather="parameters" if self._number % 4 < 2 else "gradients"),
            )
        else:
            wrapped.use_stock_ddp(keep_connections=self._number % 3 > 0)
        self._number += 1

    def _put(self, wrapped: Tunable, schedule: BucketSchedule) -> None:
        wrapped.reschedule(replace(schedule, gathers_after=()))
        self._schedule = wrapped.schedule

    def _finish(self, reason: str) -> None:
        raise AssertionError(reason)

    def _trained_otherwise(self, wrapped: Tunable) -> None:
        self._begin(wrapped)

    def _scheduled_otherwise(self, wrapped: Tunable) -> None:
        self._begin(wrapped)
