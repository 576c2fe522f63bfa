"""What is known of optimizers: how far apart an update may be taken."""

from __future__ import annotations

import enum

from torch import optim
from torch.optim import Optimizer


class Kind(enum.Enum):
    """What the update of an element depends on: that element alone, its parameter, or anything."""

    ELEMENT = "element"
    PARAMETER = "parameter"
    WHOLE = "whole"


_BY_ELEMENT = (
    "SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD",
)  # fmt: skip
_BY_PARAMETER = ("Adafactor", "Muon")


def kind_of(optimizer: Optimizer) -> Kind:
    """The kind of ``optimizer``, by its exact class: a subclass may do anything."""
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return Kind.WHOLE
    for names, kind in ((_BY_ELEMENT, Kind.ELEMENT), (_BY_PARAMETER, Kind.PARAMETER)):
        if any(type(optimizer) is getattr(optim, name, None) for name in names):
            return kind
    return Kind.WHOLE
