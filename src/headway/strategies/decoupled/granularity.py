"""What is known of optimizers: how far apart an update may be taken."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer


class UpdateGranularity(enum.Enum):
    """What the update of an element depends on: that element alone, its parameter, or anything."""

    ELEMENTWISE = "elementwise"
    PER_PARAMETER = "per_parameter"
    GLOBAL = "global"


_BY_ELEMENT = (
    "SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD",
)  # fmt: skip
_BY_PARAMETER = ("Adafactor", "Muon")


def granularity_of(optimizer: Optimizer) -> UpdateGranularity:
    """The granularity of ``optimizer``'s update, by its exact class: a subclass may do anything."""
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return UpdateGranularity.GLOBAL
    return granularity_named(name_of(optimizer))


def name_of(optimizer: Optimizer) -> str:
    """The name of its class where that is torch's own, else its whole name with the module's."""
    from torch import optim

    kind = type(optimizer)
    own = getattr(optim, kind.__name__, None) is kind
    return kind.__name__ if own else f"{kind.__module__}.{kind.__qualname__}"


def granularity_named(name: str) -> UpdateGranularity:
    """The granularity of an optimizer's update with this ``name_of``."""
    if name in _BY_ELEMENT:
        return UpdateGranularity.ELEMENTWISE
    return UpdateGranularity.PER_PARAMETER if name in _BY_PARAMETER else UpdateGranularity.GLOBAL
