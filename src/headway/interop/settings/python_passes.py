"""A plan's passes in plain torch: what changes a model before it is wrapped, and arguments of what a script makes."""

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
    """A module that says at its top what it does of a plan and what not, in a comment of printable lines."""
    head = [f"# Written by Headway {__version__}: {one_line(gist)}."]
    head += [f"# Left out: {one_line(lack)}." for lack in lacks]
    return "\n".join(head) + "\n\n" + body.strip("\n") + "\n"


def literal(value: object) -> str:
    """``value``, of plain types, as Python writes it, over several lines where it is long."""
    return pprint.pformat(value, width=100, compact=True, sort_dicts=False)


_RECOMPUTE = '''
def recompute(module):
    """Keep only what the module is given, and compute the rest again in backward."""
    module.forward = partial(recomputed, module, module.forward)


def recomputed(module, forward, *inputs, **named):
    if not torch.is_grad_enabled():
        return forward(*inputs, **named)
    contexts = partial(as_forward_found, module)
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **named)


def as_forward_found(module):
    """Forward runs as ever, and again with the buffers that it found: running means are changed once."""
    owned = [(owner, name) for owner in module.modules() for name, _ in owner.named_buffers(recurse=False)]
    return nullcontext(), with_buffers([(owner, name, getattr(owner, name).clone()) for owner, name in owned])


@contextmanager
def with_buffers(found):
    left = [(owner, name, getattr(owner, name)) for owner, name, _ in found]
    try:
        for owner, name, buffer in found:
            setattr(owner, name, buffer)
        yield
    finally:
        for owner, name, buffer in left:
            setattr(owner, name, buffer)
'''
_LOWER_PRECISION = '''
def lower_precision(module):
    """Compute under autocast, and put out float32."""
    module.forward = partial(in_bfloat16, module, module.forward)


def in_bfloat16(module, forward, *inputs, **named):
    tensors = [each for each in (*inputs, *named.values()) if isinstance(each, torch.Tensor)]
    device = next((each.device.type for each in (*tensors, *module.parameters())), "cpu")
    with torch.autocast(device, dtype=torch.bfloat16):
        computed = forward(*inputs, **named)
    return in_float32(computed)


def in_float32(value):
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype is torch.bfloat16 else value
    if isinstance(value, (tuple, list)):
        made = [in_float32(each) for each in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, each in value.items():
            made[key] = in_float32(each)
        return made
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, in_float32(getattr(value, field.name)))
        return made
    return value
'''
_PREPARE = '''
def prepare(module):
    """Change how the module computes, before it is wrapped."""
{calls}
'''
_FOR_EACH = """\
    for name in {names}:
        {call}"""


@dataclass(frozen=True)
class InTorch:
    """Passes as a part of a Python file.

    ``code`` is to follow ``imports``; it defines ``prepare(module)`` where it ``prepares``, and arguments by the names
    that ``use`` says. ``lacks`` are the passes that are neither.
    """

    imports: str = ""
    code: str = ""
    prepares: bool = False
    gists: tuple[str, ...] = ()
    use: str = ""
    lacks: tuple[str, ...] = ()

    def call(self, name: str) -> str:
        """The line of a function that prepares its argument ``name``; "" where there is nothing to prepare."""
        return f"    prepare({name})\n" if self.prepares else ""


def in_torch(passes: Sequence[Pass], unsynchronised: str = "under no_sync()") -> InTorch:
    """``passes`` as they are carried out by hand, in their order.

    ``unsynchronised`` says how a backward is run whose gradients are not communicated.
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
            lacks.append("evaluation as it was: it runs compiled, too")
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
            uses.append(
                " Construct the loaders of training, of data sets that can be indexed, with **LOADER."
            )
            gists.append(pass_.describe())
        else:
            lacks.append(f"the pass {pass_.name}{_by_hand(pass_, unsynchronised)}")
    code = "".join(helpers)
    if calls:
        code += _PREPARE.format(calls="\n".join(calls))
    code += "".join(f"\n{argument}\n" for argument in arguments)
    return InTorch(
        "".join(f"{import_}\n" for import_ in imports),
        code,
        bool(calls),
        (*prepared, *gists),
        "".join(uses),
        tuple(lacks),
    )


def _for_each(names: Sequence[str], call: str) -> str:
    return _FOR_EACH.format(names=literal(list(names)).replace("\n", "\n    "), call=call)


def _by_hand(one: Pass, unsynchronised: str) -> str:
    """What a script has to do itself, where that is known."""
    if isinstance(one, Accumulate):
        count = one.micro_batches
        return (
            f": have the script train {count} parts of a batch, with losses divided by {count}, all but the last "
            f"{unsynchronised}"
        )
    if isinstance(one, Precision):
        return f" in {one.dtype}: use torch.autocast and torch.amp.GradScaler in the script"
    return ""
