"""Finds the chain of modules along which a model can be cut into pipeline stages, by watching one forward.

Modules form a chain if each receives the very tensor that the previous one returned, and if no path in the autograd
graph bypasses any of them. Both are checked. No tensor is kept.
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
from headway.recording.watch import Watch


class NoChainError(Exception):
    """The model is not a chain of modules; the message says why."""


def parameters_between(nodes: Sequence[Any], ends: Sequence[Any]) -> list[frozenset[int]]:
    """Group the ids of parameters by the part of the graph that uses them: before each of ``nodes``, and up to ``ends``.

    ``nodes`` are the autograd nodes of the tensors passed from module to module. Raises NoChainError if a gradient
    bypasses one of them.
    """
    handed_on = set(nodes)
    before: set[Any] = set()  # nodes of later parts; a reference keeps each node's Python wrapper alive
    used_by_part: list[frozenset[int]] = []
    for place in range(len(nodes), -1, -1):
        starts = set(ends) if place == len(nodes) else {nodes[place]}
        stop = {nodes[place - 1]} if place else set()
        reached, parameters = _reached(starts, stop)
        if reached & before or (reached - starts) & handed_on:
            raise NoChainError("a tensor bypasses a module and is used by a later one")
        before |= reached
        used_by_part.append(parameters)
    return used_by_part[::-1]


def _reached(starts: set[Any], stop: set[Any]) -> tuple[set[Any], frozenset[int]]:
    """The nodes reachable from ``starts`` without passing ``stop``, and the ids of the parameters they use."""
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


COMPILED = "modules run compiled, so their outputs cannot be seen"
LARGE_PART = (
    0.8  # of the largest chain's parameters: among chains that have as much, the one with most modules
)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class ChainWatch(Watch):
    """Looks for the model's chain of modules in the next training forward.

    The result stays in ``found``. The hooks, and everything noted about tensors, are gone when that forward ends.
    """

    def __init__(self) -> None:
        self.found: Chain | None = None
        self._handles: list[Any] = []
        self._look: _Look | None = None

    def arm(self, model: nn.Module) -> None:
        """Watch the next forward of ``model``, or of the module that DistributedDataParallel wraps."""
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

    def detach(self) -> None:
        """Remove every hook."""
        self.disarm()

    def disarm(self, why: str = "") -> None:
        """Remove every hook. If ``why`` is given, the result becomes "no chain", for that reason."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._look = None
        if why:
            self.found = Chain(why_not=why)

    def _give_up(self, failure: Exception) -> None:
        self.disarm(f"watching its forward failed: {describe_failure(failure)}")

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
    """One call of a container's child. ``follows``: its only input was the previous child's output.

    ``put_out`` counts the outputs of innermost modules before the call. ``node`` is the output's autograd node; None
    unless the output is a single tensor that requires gradients.
    """

    place: int
    name: str
    put_out: int
    follows: bool
    version: int = 0
    input_ref: Any = None  # a weak reference
    changed: bool = False  # whether the module wrote to its input in place
    node: Any = None
    output: Any = None  # a weak reference
    output_version: int = 0
    output_bytes: int = 0
    rows: int = 0


@dataclass(slots=True)
class _Look:
    """What is noted during one forward."""

    root: nn.Module
    children: dict[str, list[tuple[str, nn.Module]]] = field(default_factory=dict)
    calls: dict[str, list[_Call]] = field(default_factory=dict)
    outputs_bytes: list[int] = field(default_factory=list)
    samples: int = 0
    inputs: str = ""  # what is wrong with the model's inputs; empty if nothing

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
            self.children = {"": self.children[""]}  # such a model is cut between its direct children

    def begins(self, _root: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.forget()
        batch = _only_tensor(args, kwargs)
        self.inputs = "" if batch is not None else "the model's input is not a single tensor"
        self.samples = batch.shape[0] if batch is not None and batch.dim() else 0

    def put_out(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self.outputs_bytes.append(
            sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(output))
        )

    def forget(self) -> None:
        self.calls = {container: [] for container in self.children}
        self.outputs_bytes = []

    def chain(self, output: Any) -> Chain:
        """The chain that this forward showed. Raises NoChainError if the model is not one."""
        if self.inputs or not self.samples:
            raise NoChainError(self.inputs or "the model's input has no batch dimension")
        calls = self._chosen()
        names = _names(self.root)
        nodes = [call.node for call in calls]
        ends = [tensor.grad_fn for tensor in tensors_of(output) if tensor.grad_fn is not None]
        used_by_part = parameters_between(nodes[:-1], ends)
        missing = [
            aliases[0] for key, aliases in names.items() if not any(key in used for used in used_by_part)
        ]
        if missing:
            raise NoChainError(f"the autograd graph does not show where {missing[0]} is used")
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
        """The bytes that a stage ending after this call would send; 0 where no stage can end.

        A stage cannot end where the next module writes to its input in place, or the output is not one row a sample.
        """
        if place + 1 == len(calls) or calls[place + 1].changed or calls[place].rows % self.samples:
            return 0
        return calls[place].output_bytes

    def _chosen(self) -> list[_Call]:
        """The chain with the most modules among those with nearly the most parameters."""
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
                "its forward does not call modules in sequence, each on the previous module's output"
            )
        return chosen

    def _runs(self, container: str) -> Iterator[list[_Call]]:
        """Yield runs of calls that follow each other; none if the container calls or holds a child twice."""
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
    """Hook: a child of a container is called."""

    def __init__(self, look: _Look, container: str, place: int, name: str, on_failure: OnFailure) -> None:
        super().__init__(self._enters, on_failure)
        self._look, self._container, self._place, self._name = look, container, place, name

    def _enters(self, *arguments: Any) -> None:
        """Note whether its input is the previous child's output."""
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
    """Hook: the child returns."""

    def __init__(self, look: _Look, container: str, on_failure: OnFailure) -> None:
        super().__init__(self._leaves, on_failure)
        self._look, self._container = look, container

    def _leaves(self, *arguments: Any) -> None:
        """Note its output, and whether it changed its input in place."""
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
    """The module inside ``model`` if that is a DistributedDataParallel; else ``model``."""
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return inner


def _only_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        return args[0]
    return None


def _names(root: nn.Module) -> dict[int, list[str]]:
    """All names of each trainable parameter by its id, in the order in which the model lists them."""
    names: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(id(parameter), []).append(name)
    return names


def _alias(names: Sequence[str], module: str) -> str:
    """The parameter's name inside ``module``; its first name if it has none there."""
    return next((name for name in names if name.startswith(f"{module}.")), names[0])
