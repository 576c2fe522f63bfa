"""Estimates the memory of a halved backward from watching a full one.

In a halved backward, torch computes the gradients of a stage's inputs first and those of its parameters later, from the
gradients that it keeps in between: those of the outputs of modules with parameters. Nothing of the graph is released
meanwhile. The allocations of a full backward, and their order, show what each half would have allocated, so that
nothing has to be computed twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from headway import torch_private
from headway.memory.pass_watch import Added, Allocations, Change, Gone, Inner, Made
from headway.model import HalvedBackward

MOST_NODES = 200_000
Groups = Sequence[tuple[int, tuple[int, ...]]]


class Kept(NamedTuple):
    """The node ``node`` begins, with gradients in memory ``keys`` of ``size_bytes`` that are kept between the halves."""

    node: int
    keys: tuple[int, ...]
    size_bytes: int


class TowardsWeights(NamedTuple):
    """The memory ``keys`` holds gradients that lead only to parameters: the first half does not compute them."""

    keys: tuple[int, ...]


Event = Change | Kept | TowardsWeights


class WholeBackward:
    """Watches one backward from ``roots`` to ``inputs`` and ``parameters``, while ``allocations`` is on.

    If no gradient reaches an input, nothing is watched: torch then postpones the whole backward.
    """

    def __init__(
        self,
        allocations: Allocations,
        roots: Iterable[torch.Tensor],
        inputs: Iterable[torch.Tensor],
        parameters: Sequence[torch.Tensor],
    ) -> None:
        self._allocations = allocations
        self._events: list[Event] = []
        self._understood = True
        self._handles: list[Any] = []
        self._groups: Groups = ()
        graph = _Graph(_nodes_of(roots), _nodes_of(inputs))
        if graph.is_halved:
            self._groups = graph.groups(
                _nodes_of(parameters), [_size_bytes(parameter) for parameter in parameters]
            )
            for number, node in enumerate(graph.kept):
                self._handles.append(node.register_prehook(self._at_kept(number)))
            for node in graph.of_weights:
                self._handles.append(node.register_prehook(self._of_weights))
            allocations.on_change = self._events.append

    def end(self) -> HalvedBackward | None:
        """The backward is done: returns the estimate, or None if there is none."""
        if not self._handles:
            return None
        self._allocations.on_change = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return halves_of(self._events, self._groups) if self._understood else None

    def _at_kept(self, number: int) -> Any:
        def begins(gradients: Any) -> None:
            self._note(gradients, lambda keys: Kept(number, keys, sum(map(_size_bytes, _strided(gradients)))))

        return begins

    def _of_weights(self, gradients: Any) -> None:
        self._note(gradients, TowardsWeights)

    def _note(self, gradients: Any, event: Any) -> None:
        try:
            self._events.append(event(tuple(_keys_of(gradients))))
        except Exception:  # training goes on, whatever tensors there are
            self._understood = False


class _Graph:
    """The nodes of a backward, divided into those that lead to inputs, and those that lead only to parameters.

    ``of_weights`` are the latter; ``kept`` are nodes directly before them, whose gradients torch keeps.
    """

    def __init__(self, roots: Sequence[Any], inputs: Sequence[Any]) -> None:
        self._following: dict[Any, list[Any]] = {}
        open_ = list(roots)
        while open_ and len(self._following) <= MOST_NODES:
            node = open_.pop()
            if node not in self._following:
                self._following[node] = [
                    next_node for next_node, _ in node.next_functions if next_node is not None
                ]
                open_ += self._following[node]
        before: dict[Any, list[Any]] = {}
        for node, following in self._following.items():
            for next_node in following:
                before.setdefault(next_node, []).append(node)
        self._to_inputs: set[Any] = set()
        open_ = [input_ for input_ in inputs if input_ in self._following]
        while open_:
            node = open_.pop()
            if node not in self._to_inputs:
                self._to_inputs.add(node)
                open_ += before.get(node, [])
        self.is_halved = bool(self._to_inputs) and len(self._following) <= MOST_NODES
        self.of_weights = [node for node in self._following if node not in self._to_inputs]
        self.kept = [
            node
            for node, following in self._following.items()
            if node in self._to_inputs and any(next_node not in self._to_inputs for next_node in following)
        ]

    def groups(self, parameters: Sequence[Any], sizes_bytes: Sequence[int]) -> Groups:
        """Group parameters whose gradients are computed together, in the order of computation.

        Each group is the size of its gradients, and the nodes (indices into ``kept``) that they come from.
        """
        nodes_of: dict[Any, list[int]] = {parameter: [] for parameter in parameters}
        for number, kept in enumerate(self.kept):
            for node in self._weights_behind(kept):
                if node in nodes_of:
                    nodes_of[node].append(number)
        sizes: dict[tuple[int, ...], int] = {}
        for node, size_bytes in zip(parameters, sizes_bytes, strict=True):
            if numbers := tuple(nodes_of[node]):
                sizes[numbers] = sizes.get(numbers, 0) + size_bytes
        return [(size_bytes, numbers) for numbers, size_bytes in sizes.items()]

    def _weights_behind(self, kept: Any) -> set[Any]:
        seen: set[Any] = set()
        open_ = [next_node for next_node in self._following[kept] if next_node not in self._to_inputs]
        while open_:
            node = open_.pop()
            if node not in seen:
                seen.add(node)
                open_ += self._following[node]
        return seen


def halves_of(events: Sequence[Event], groups: Groups) -> HalvedBackward:
    """Estimate what the halves of the backward with these ``events`` would hold.

    ``groups`` are the gradients of parameters in the order in which the second half computes them: their size, and the
    nodes that they come from.
    """
    first = _FirstHalf(_of_weights(events))
    for number, event in enumerate(events):
        first.goes_on(number, event)
    put_off_bytes = max(0, first.held_bytes - first.released_bytes)
    first_weight_bytes, weight_bytes = (
        _second_half_bytes(groups, first, stays=stays) for stays in (True, False)
    )
    return HalvedBackward(
        input_bytes=max(first.most_bytes, put_off_bytes), put_off_bytes=put_off_bytes,
        first_weight_bytes=first_weight_bytes, weight_bytes=weight_bytes,
    )  # fmt: skip


def _of_weights(events: Sequence[Event]) -> set[int]:
    """The indices of ``Made`` events whose memory held gradients that lead only to parameters."""
    number_of: dict[int, int] = {}
    kept: set[int] = set()
    discarded: set[int] = set()
    for number, event in enumerate(events):
        match event:
            case Made(key):
                number_of[key] = number
            case Kept(keys=keys):
                kept.update(number_of[key] for key in keys if key in number_of)
            case TowardsWeights(keys):
                discarded.update(number_of[key] for key in keys if key in number_of)
            case Gone(key):
                number_of.pop(key, None)
    return discarded - kept


class _FirstHalf:
    """Replays a full backward's events, counting only what the first half would allocate."""

    def __init__(self, of_weights: set[int]) -> None:
        self.held_bytes = self.most_bytes = self.released_bytes = 0
        self.kept: dict[int, dict[int, int]] = {}  # node -> event index -> size of kept memory
        self.sizes_bytes: dict[int, int] = {}  # node -> size of the gradients that it begins with
        self.inner_bytes: dict[int, int] = {}  # node -> largest workspace of its operators
        self._of_weights = of_weights
        self._node = -1
        self._held: dict[int, int] = {}  # key -> size
        self._event_of: dict[int, int] = {}  # key -> index of its ``Made`` event
        self._kept_keys: set[int] = set()
        self._stands_in: dict[int, int] = {}  # key -> size of the copy that replaces a sum in kept memory

    def goes_on(self, number: int, event: Event) -> None:
        match event:
            case Made(key, size_bytes) if number not in self._of_weights:
                self._held[key], self._event_of[key] = size_bytes, number
                self._grow(size_bytes)
            case Kept(node, keys, size_bytes):
                self._node = node
                self.sizes_bytes[node] = size_bytes
                self.kept[node] = {self._event_of[key]: self._held[key] for key in keys if key in self._held}
                self._kept_keys.update(key for key in keys if key in self._held)
            case Added(key, source) if key in self._kept_keys and key not in self._stands_in:
                self._add(key, source)
            case Inner(size_bytes):
                self.most_bytes = max(self.most_bytes, self.held_bytes + size_bytes)
                self.inner_bytes[self._node] = max(self.inner_bytes.get(self._node, 0), size_bytes)
            case Gone(key, size_bytes):
                self._go(key, size_bytes)

    def _grow(self, size_bytes: int) -> None:
        self.held_bytes += size_bytes
        self.most_bytes = max(self.most_bytes, self.held_bytes)

    def _add(self, key: int, source: int) -> None:
        """Kept memory is not written to: the sum goes to the memory of ``source``, or to new memory."""
        self._stands_in[key] = self._held[key]
        if source in self._held and source not in self._kept_keys:
            del self._held[source]
        else:
            self._grow(self._held[key])

    def _go(self, key: int, size_bytes: int) -> None:
        if key in self._kept_keys:
            self.held_bytes -= self._stands_in.pop(key, 0)
            self._kept_keys.discard(key)
            self._held.pop(key)
        elif key in self._held:
            self.held_bytes -= self._held.pop(key)
        elif self._node < 0:  # of the graph before all that is kept, so it is no longer needed
            self.released_bytes += size_bytes


def _second_half_bytes(groups: Groups, first: _FirstHalf, *, stays: bool) -> int:
    """The peak of the half that computes parameters' gradients. They stay allocated if ``stays``, else are added up."""
    uses: dict[int, int] = {}
    for _, nodes in groups:
        for node in nodes:
            for number in first.kept.get(node, {}):
                uses[number] = uses.get(number, 0) + 1
    held_bytes = most_bytes = 0
    for size_bytes, nodes in groups:
        inner_bytes = max((first.inner_bytes.get(node, 0) for node in nodes), default=0)
        if len(nodes) > 1:  # a weight used several times: add the gradients computed between its uses
            inner_bytes += sum(first.sizes_bytes.get(node, 0) for node in nodes)
        most_bytes = max(most_bytes, held_bytes + size_bytes + inner_bytes)
        held_bytes += size_bytes if stays else 0
        for node in nodes:
            for number, kept_bytes in first.kept.get(node, {}).items():
                uses[number] -= 1
                held_bytes -= 0 if uses[number] else kept_bytes
    return max(0, most_bytes)


def _nodes_of(tensors: Iterable[torch.Tensor]) -> list[Any]:
    return [torch.autograd.graph.get_gradient_edge(tensor).node for tensor in tensors if tensor.requires_grad]


def _strided(gradients: Any) -> list[torch.Tensor]:
    return [tensor for tensor in torch_private.tensors_in(gradients) if tensor.layout == torch.strided]


def _keys_of(gradients: Any) -> list[int]:
    return [torch_private.storage_key(tensor.untyped_storage()) for tensor in _strided(gradients)]


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
