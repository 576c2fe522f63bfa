"""Operator fusion: modules run as code that ``torch.compile`` has made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from headway.graph.timeline import Timeline
from headway.passes.compiled_times import as_single_graphs
from headway.passes.measured import MeasuredModules
from headway.passes.regions import in_few_words

if TYPE_CHECKING:
    from torch import nn


class Compile(MeasuredModules):
    """The forward of each of ``modules`` is compiled while gradients are recorded, and so is its backward.

    Results change in their last bits, and dropout draws other random numbers.
    """

    name: ClassVar[str] = "compile"
    stands_first: ClassVar[bool] = True
    measured_by: ClassVar[str] = "python -m headway.measuring.compiling TRACE [MODULE ...]"

    modules: tuple[str, ...] = Field(min_length=1, max_length=4096)
    """Paths of modules within the wrapped model, as ``named_modules`` has them. None lies within another.

    The gradients of each are there when its whole backward is done.
    """

    def rearranged(self, timeline: Timeline) -> Timeline:
        """Each module's gradients are ready together, and the first needs all parameters that are needed after it."""
        return as_single_graphs(timeline, self.modules)

    def apply(self, module: nn.Module, optimizer: Any) -> nn.Module:
        """``module`` itself, of which the modules run compiled. Code is made when they first run.

        Raises UnsupportedError for a path that it does not have, and a module that is compiled or changed already.
        """
        del optimizer
        from headway.passes.compiled_modules import compile_modules

        compile_modules(module, self.modules)
        return module

    def describe(self) -> str:
        """Say how many modules are compiled, or which one."""
        return f"compile {in_few_words(self.modules)}"
