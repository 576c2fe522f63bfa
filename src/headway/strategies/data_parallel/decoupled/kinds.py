"""What is known of optimizers: how far apart an update may be taken."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    return kind_named(name_of(optimizer))


def name_of(optimizer: Optimizer) -> str:
    """The name of its class where that is torch's own, else its whole name with the module's."""
    from torch import optim

    kind = type(optimizer)
    own = getattr(optim, kind.__name__, None) is kind
    return kind.__name__ if own else f"{kind.__module__}.{kind.__qualname__}"


def kind_named(name: str) -> Kind:
    """The kind of an optimizer with this ``name_of``."""
    if name in _BY_ELEMENT:
        return Kind.ELEMENT
    return Kind.PARAMETER if name in _BY_PARAMETER else Kind.WHOLE
