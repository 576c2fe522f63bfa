"""Which modules of a model hand on to each other, and how much: seen in one forward, without keeping a tensor.

A chain is what a model can be cut along into the stages of a pipeline. That it is one is read off twice: each module is
given the very tensor that the one before it has put out, and the autograd graph has no way around any of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway import torch_private
from headway.model import Chain, ChainLink
from headway.recording.modules import JobHook, tensors_of
from headway.recording.patching import OnFailure, describe_failure


class NoChainError(Exception):
    """A model is not a chain; the message says why."""


def parameters_between(nodes: Sequence[Any], ends: Sequence[Any]) -> list[frozenset[int]]:
    """The ids of the parameters that are used up to each of ``nodes``, and from the last of them to ``ends``.

    A node is that of the tensor that a module hands on. Raises NoChainError where a gradient goes around one.
    """
    handed_on = set(nodes)
    before: set[Any] = set()  # nodes of what follows; holding them keeps their wrappers the same
    used_by_part: list[frozenset[int]] = []
    for place in range(len(nodes), -1, -1):
        starts = set(ends) if place == len(nodes) else {nodes[place]}
        stop = {nodes[place - 1]} if place else set()
        reached, parameters = _reached(starts, stop)
        if reached & before or (reached - starts) & handed_on:
            raise NoChainError("a tensor goes around some module to a later one")
        before |= reached
        used_by_part.append(parameters)
    return used_by_part[::-1]


def _reached(starts: set[Any], stop: set[Any]) -> tuple[set[Any], frozenset[int]]:
    """The nodes from ``starts`` to ``stop``, without that, and the ids of the parameters that they use."""
    seen: set[Any] = set()
    parameters = set()
    left = list(starts)
    while left:
        node = left.pop()
        if node is None or node in stop or node in seen:
            continue
        if (variable := getattr(node, "variable", None)) is not None:
            parameters.add(id(variable))
            continue
        seen.add(node)
        left += [next_node for next_node, _ in node.next_functions]
    return seen, frozenset(parameters)


COMPILED = "modules run compiled, and what they hand on is not seen"
LARGE_PART = (
    0.8  # of the largest chain's parameters: among chains that have as much, the one with most modules
)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class ChainWatch:
    """Looks for the chain of a model in the next forward that is to be followed by a backward.

    What it has found stays in ``found``; its hooks are gone when that forward has ended, and so is all that it knew of
    tensors.
    """

    def __init__(self) -> None:
        self.found: Chain | None = None
        self._handles: list[Any] = []
        self._look: _Look | None = None

    def arm(self, model: nn.Module) -> None:
        """Look at the next forward of ``model``, or of what DistributedDataParallel wraps in it."""
        self.disarm()
        root = unwrapped(model)
        modules = list(root.modules())
        if len(torch_private.eager_modules(root)) < len(modules):
            self.found = Chain(why_not=COMPILED)
            return
        look = self._look = _Look(root)
        on_failure = self._give_up
        for container, children in look.children.items():
            for place, (name, child) in enumerate(children):
                enter, leave = (
                    _Enter(look, container, place, name, on_failure),
                    _Leave(look, container, on_failure),
                )
                self._handles.append(child.register_forward_pre_hook(enter, with_kwargs=True))
                self._handles.append(child.register_forward_hook(leave))
        for module in modules:
            if not any(True for _ in module.children()):
                self._handles.append(module.register_forward_hook(JobHook(look.put_out, on_failure)))
        self._handles.append(
            root.register_forward_pre_hook(JobHook(look.begins, on_failure), with_kwargs=True, prepend=True)
        )
        self._handles.append(root.register_forward_hook(JobHook(self._ends, on_failure)))

    def disarm(self, why: str = "") -> None:
        """Remove every hook; ``why`` takes the place of what was found."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._look = None
        if why:
            self.found = Chain(why_not=why)

    def _give_up(self, failure: Exception) -> None:
        self.disarm(f"looking at its forward failed: {describe_failure(failure)}")

    def _ends(self, _root: nn.Module, _inputs: Any, output: Any) -> None:
        look = self._look
        if look is None or not torch.is_grad_enabled():  # an evaluation
            if look is not None:
                look.forget()
            return
        try:
            self.found = look.chain(output)
        except NoChainError as why:
            self.found = Chain(why_not=str(why))
        self.disarm()


@dataclass(slots=True)
class _Call:
    """One call of a child of a container: whether it was given what the child before it has put out, and nothing else.

    ``put_out`` counts what innermost modules had put out before it; ``node`` is that of its output in the graph, None
    where that is not one tensor with gradients.
    """

    place: int
    name: str
    put_out: int
    follows: bool
    version: int = 0
    input_ref: Any = None  # a weak reference
    changed: bool = False  # its input, in place
    node: Any = None
    output: Any = None  # a weak reference
    output_version: int = 0
    output_bytes: int = 0
    rows: int = 0


@dataclass(slots=True)
class _Look:
    """One forward."""

    root: nn.Module
    children: dict[str, list[tuple[str, nn.Module]]] = field(default_factory=dict)
    calls: dict[str, list[_Call]] = field(default_factory=dict)
    outputs_bytes: list[int] = field(default_factory=list)
    samples: int = 0
    inputs: str = ""  # what is wrong with those of the model

    def __post_init__(self) -> None:
        for name, module in self.root.named_modules():
            if module is self.root or isinstance(module, (nn.Sequential, nn.ModuleList)):
                prefix = f"{name}." if name else ""
                inner = module.named_modules(remove_duplicate=False)
                self.children[name] = [
                    (f"{prefix}{child}", child_module)
                    for child, child_module in inner
                    if child and "." not in child
                ]
        if type(self.root).forward is nn.Sequential.forward:
            self.children = {"": self.children[""]}  # the way in which it is cut

    def begins(self, _root: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.forget()
        batch = _only_tensor(args, kwargs)
        self.inputs = "" if batch is not None else "the model is not given one tensor"
        self.samples = batch.shape[0] if batch is not None and batch.dim() else 0

    def put_out(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self.outputs_bytes.append(
            sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(output))
        )

    def forget(self) -> None:
        self.calls = {container: [] for container in self.children}
        self.outputs_bytes = []

    def chain(self, output: Any) -> Chain:
        """What this forward has shown. Raises NoChainError."""
        if self.inputs or not self.samples:
            raise NoChainError(self.inputs or "the model's input has no dimension of samples")
        calls = self._chosen()
        names = _names(self.root)
        nodes = [call.node for call in calls]
        ends = [tensor.grad_fn for tensor in tensors_of(output) if tensor.grad_fn is not None]
        used_by_part = parameters_between(nodes[:-1], ends)
        missing = [
            aliases[0] for key, aliases in names.items() if not any(key in used for used in used_by_part)
        ]
        if missing:
            raise NoChainError(f"the graph of gradients does not show where {missing[0]} is used")
        order = {name: at for at, (name, _) in enumerate(self.root.named_parameters(remove_duplicate=False))}
        aliases: dict[str, str] = {}
        links = []
        for place, (call, used) in enumerate(zip(calls, used_by_part, strict=True)):
            name_of = {_alias(names[key], call.name): names[key][0] for key in names if key in used}
            name_of = {alias: name_of[alias] for alias in sorted(name_of, key=order.__getitem__)}
            aliases |= {alias: name for alias, name in name_of.items() if alias != name}
            links.append(
                ChainLink(
                    name=call.name,
                    parameters=tuple(name_of),
                    output_bytes=self._handed_on_bytes(calls, place),
                    kept_bytes=sum(self.outputs_bytes[slice(*self._span(calls, place))]),
                )
            )
        norms = any(isinstance(module, _BATCH_NORMS) for module in self.root.modules())
        return Chain(links=tuple(links), samples=self.samples, aliases=aliases, batch_norms=norms)

    def _span(self, calls: Sequence[_Call], place: int) -> tuple[int, int | None]:
        begin = calls[place].put_out if place else 0
        return begin, calls[place + 1].put_out if place + 1 < len(calls) else None

    def _handed_on_bytes(self, calls: Sequence[_Call], place: int) -> int:
        """What a stage that ends behind a call hands on; 0 where none can: received tensors are not to be changed."""
        if place + 1 == len(calls) or calls[place + 1].changed or calls[place].rows % self.samples:
            return 0
        return calls[place].output_bytes

    def _chosen(self) -> list[_Call]:
        """The chain with most modules among those with most parameters."""
        sizes: dict[int, int] = {}
        runs = [run for container in self.children for run in self._runs(container)]
        modules = dict(self.root.named_modules(remove_duplicate=False))
        for at, run in enumerate(runs):
            parameters = {
                id(parameter): parameter for call in run for parameter in modules[call.name].parameters()
            }
            sizes[at] = sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())
        most = max(sizes.values(), default=0)
        large = [runs[at] for at, size in sizes.items() if size >= LARGE_PART * most]
        chosen = max(large, key=len, default=[])
        if len(chosen) < 2 or not most:
            raise NoChainError(
                "its forward does not call modules one after the other, each with the other's output"
            )
        return chosen

    def _runs(self, container: str) -> Iterator[list[_Call]]:
        """Calls that follow each other; none of a container with a child that is called again."""
        calls = self.calls[container]
        if len({call.place for call in calls}) < len(calls) or len(
            {id(module) for _, module in self.children[container]}
        ) < len(self.children[container]):
            return
        run: list[_Call] = []
        for call in calls:
            if run and not call.follows:
                yield run
                run = []
            run.append(call)
        if run:
            yield run


class _Enter(JobHook):
    """A child of a container is called."""

    def __init__(self, look: _Look, container: str, place: int, name: str, on_failure: OnFailure) -> None:
        super().__init__(self._enters, on_failure)
        self._look, self._container, self._place, self._name = look, container, place, name

    def _enters(self, *arguments: Any) -> None:
        """Note whether it is given what the one before it has put out."""
        _module, args, kwargs = arguments
        calls = self._look.calls.get(self._container)
        if calls is None or not torch.is_grad_enabled():  # an evaluation
            return
        input_ = _only_tensor(args, kwargs)
        before = calls[-1] if calls else None
        follows = (
            input_ is not None
            and before is not None
            and before.node is not None
            and before.output is not None
            and before.output() is input_
            and before.output_version == torch_private.version_or_zero(input_)
        )
        call = _Call(self._place, self._name, len(self._look.outputs_bytes), follows)
        if input_ is not None:
            call.input_ref, call.version = weakref.ref(input_), torch_private.version_or_zero(input_)
        calls.append(call)


class _Leave(JobHook):
    """It returns."""

    def __init__(self, look: _Look, container: str, on_failure: OnFailure) -> None:
        super().__init__(self._leaves, on_failure)
        self._look, self._container = look, container

    def _leaves(self, *arguments: Any) -> None:
        """Note what it hands on, and whether it has changed what it was given."""
        _module, _args, output = arguments
        calls = self._look.calls.get(self._container)
        if not calls or not torch.is_grad_enabled():
            return
        call = calls[-1]
        input_ = call.input_ref() if call.input_ref is not None else None
        call.changed = input_ is not None and (
            input_ is output or torch_private.version_or_zero(input_) != call.version
        )
        if isinstance(output, torch.Tensor) and output.grad_fn is not None and output.is_floating_point():
            call.node, call.output = output.grad_fn, weakref.ref(output)
            call.output_version = torch_private.version_or_zero(output)
            call.output_bytes = output.numel() * output.element_size()
            call.rows = output.shape[0] if output.dim() else 1


def unwrapped(model: nn.Module) -> nn.Module:
    """What DistributedDataParallel wraps in ``model``, or itself."""
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return inner


def _only_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        return args[0]
    return None


def _names(root: nn.Module) -> dict[int, list[str]]:
    """All names of each trainable parameter, the one that the model lists it under first."""
    names: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(id(parameter), []).append(name)
    return names


def _alias(names: Sequence[str], module: str) -> str:
    """The name of a parameter that it has inside of ``module``, where it has one."""
    return next((name for name in names if name.startswith(f"{module}.")), names[0])
