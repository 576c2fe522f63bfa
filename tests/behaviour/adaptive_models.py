"""Models that are wrapped so that what does their steps can change while they train."""

from __future__ import annotations

from typing import Any

from torch import nn

from headway.scheduling.buckets import BucketSchedule
from headway.strategies.adaptive.policy import AdaptiveStrategy
from headway.strategies.adaptive.wrapper import AdaptiveDataParallel
from headway.strategies.base import Strategy
from headway.strategies.decoupled.policy import strategy_of
from headway.strategies.live.module_spec import model_spec


def adaptive(
    module: nn.Module, begin_as: Strategy, *, tune: bool = False, adapt: bool = False, **ddp_options: Any
) -> AdaptiveDataParallel:
    """``module`` that begins as ``begin_as``, and changes by itself where it is to ``tune`` or ``adapt``."""
    strategy = AdaptiveStrategy(begin_as=begin_as, tune=tune, adapt=adapt)
    return AdaptiveDataParallel(module, strategy=strategy, **ddp_options)


def under_schedule(module: nn.Module, schedule: BucketSchedule, **ddp_options: Any) -> AdaptiveDataParallel:
    """``module`` that begins with a decoupled ``schedule`` and changes by hand alone."""
    return adaptive(module, strategy_of(schedule, model_spec(module)), **ddp_options)
