"""Exports a plan's passes as plain torch code that prepares a model, and as arguments for the script."""

from __future__ import annotations

import pprint
from collections.abc import Sequence
from dataclasses import dataclass

from headway.errors import one_line
from headway.passes.accumulate import Accumulate
from headway.passes.base import Pass
from headway.passes.compile import Compile
from headway.passes.input_workers import InputWorkers
from headway.passes.optimizer import OptimizerImplementation
from headway.passes.precision import Precision
from headway.passes.recompute import Recompute
from headway.version import __version__


def python_file(gist: str, lacks: tuple[str, ...], body: str) -> str:
    """A Python file with a comment on top that says what it contains of a plan, and what it leaves out."""
    head = [f"# Written by Headway {__version__}: {one_line(gist)}."]
    head += [f"# Left out: {one_line(lack)}." for lack in lacks]
    return "\n".join(head) + "\n\n" + body.strip("\n") + "\n"


def literal(value: object) -> str:
    """``value``, of plain types, as a Python literal; long ones span several lines."""
    return pprint.pformat(value, width=100, compact=True, sort_dicts=False)


_RECOMPUTE = '''
def recompute(module):
    """Keep only the module's inputs, and recompute the rest in backward."""
    module.forward = partial(recomputed, module, module.forward)


def recomputed(module, forward, *inputs, **named):
    if not torch.is_grad_enabled():
        return forward(*inputs, **named)
    contexts = partial(buffers_as_before, module)
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **named)


def buffers_as_before(module):
    """Recompute with the buffers from before forward, so that running means are updated only once."""
    owned = [(owner, name) for owner in module.modules() for name, _ in owner.named_buffers(recurse=False)]
    return nullcontext(), with_buffers([(owner, name, getattr(owner, name).clone()) for owner, name in owned])


@contextmanager
def with_buffers(saved):
    current = [(owner, name, getattr(owner, name)) for owner, name, _ in saved]
    try:
        for owner, name, buffer in saved:
            setattr(owner, name, buffer)
        yield
    finally:
        for owner, name, buffer in current:
            setattr(owner, name, buffer)
'''
_LOWER_PRECISION = '''
def lower_precision(module):
    """Compute under autocast, and return float32."""
    module.forward = partial(in_bfloat16, module, module.forward)


def in_bfloat16(module, forward, *inputs, **named):
    tensors = [value for value in (*inputs, *named.values()) if isinstance(value, torch.Tensor)]
    device = next((tensor.device.type for tensor in (*tensors, *module.parameters())), "cpu")
    with torch.autocast(device, dtype=torch.bfloat16):
        computed = forward(*inputs, **named)
    return in_float32(computed)


def in_float32(value):
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype is torch.bfloat16 else value
    if isinstance(value, (tuple, list)):
        items = [in_float32(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        converted = copy.copy(value)
        for key, item in value.items():
            converted[key] = in_float32(item)
        return converted
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        converted = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(converted, field.name, in_float32(getattr(value, field.name)))
        return converted
    return value
'''
_PREPARE = '''
def prepare(module):
    """Apply the plan's passes to the module, before it is wrapped."""
{calls}
'''
_FOR_EACH = """\
    for name in {names}:
        {call}"""


@dataclass(frozen=True)
class TorchCode:
    """Passes as parts of a Python file.

    ``code`` follows ``imports``; it defines ``prepare(module)`` if ``prepares``, and the arguments that ``use``
    mentions. ``lacks`` are the passes that it leaves out.
    """

    imports: str = ""
    code: str = ""
    prepares: bool = False
    gists: tuple[str, ...] = ()
    use: str = ""
    lacks: tuple[str, ...] = ()

    def call(self, name: str) -> str:
        """A line of code that prepares the variable ``name``, or ""."""
        return f"    prepare({name})\n" if self.prepares else ""


def torch_code(passes: Sequence[Pass], unsynchronised: str = "under no_sync()") -> TorchCode:
    """Export ``passes`` as code, in order.

    ``unsynchronised`` describes how to run a backward without communication of gradients.
    """
    imports: dict[str, None] = {}
    helpers: dict[str, None] = {}
    calls, arguments, gists, uses, lacks = [], [], [], [], []
    prepared = []
    for pass_ in passes:
        if isinstance(pass_, Recompute):
            imports |= dict.fromkeys(
                (
                    "from contextlib import contextmanager, nullcontext", "from functools import partial",
                    "import torch", "from torch.utils.checkpoint import checkpoint",
                )
            )  # fmt: skip
            helpers[_RECOMPUTE] = None
            calls.append(_for_each(pass_.modules, "recompute(module.get_submodule(name))"))
            prepared.append(pass_.describe())
        elif isinstance(pass_, Compile):
            calls.append(_for_each(pass_.modules, "module.get_submodule(name).compile()"))
            prepared.append(pass_.describe())
            lacks.append("uncompiled evaluation: it runs compiled, too")
        elif isinstance(pass_, Precision) and not pass_.leaves_out_steps:
            imports |= dict.fromkeys(
                ("import copy", "import dataclasses", "from functools import partial", "import torch")
            )
            helpers[_LOWER_PRECISION] = None
            calls.append(_for_each(pass_.modules or ("",), "lower_precision(module.get_submodule(name))"))
            prepared.append(pass_.describe())
        elif isinstance(pass_, OptimizerImplementation):
            arguments.append(f"OPTIMIZER = {literal({pass_.implementation: True})}")
            uses.append(" Construct the optimizer with **OPTIMIZER.")
            gists.append(pass_.describe())
        elif isinstance(pass_, InputWorkers):
            loading = {"num_workers": pass_.workers, "prefetch_factor": pass_.prefetch}
            arguments.append(f"LOADER = {literal(loading)}")
            uses.append(" Construct training data loaders of map-style data sets with **LOADER.")
            gists.append(pass_.describe())
        else:
            lacks.append(f"the pass {pass_.name}{_by_hand(pass_, unsynchronised)}")
    code = "".join(helpers)
    if calls:
        code += _PREPARE.format(calls="\n".join(calls))
    code += "".join(f"\n{argument}\n" for argument in arguments)
    return TorchCode(
        "".join(f"{import_}\n" for import_ in imports),
        code,
        bool(calls),
        (*prepared, *gists),
        "".join(uses),
        tuple(lacks),
    )


def _for_each(names: Sequence[str], call: str) -> str:
    return _FOR_EACH.format(names=literal(list(names)).replace("\n", "\n    "), call=call)


def _by_hand(pass_: Pass, unsynchronised: str) -> str:
    """Instructions for the script to do it itself, or ""."""
    if isinstance(pass_, Accumulate):
        count = pass_.micro_batches
        return (
            f": train {count} parts of a batch in the script, with losses divided by {count}, all but the last "
            f"{unsynchronised}"
        )
    if isinstance(pass_, Precision):
        return f" in {pass_.dtype}: use torch.autocast and torch.amp.GradScaler in the script"
    return ""
