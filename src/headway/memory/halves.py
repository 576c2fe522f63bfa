"""What the halves of a backward would hold, told from a whole one that is watched.

torch computes the gradients of a stage's input first and those of its parameters later, from what it has kept of the
gradients in between: those of what modules with parameters have put out. Nothing of the graph is released meanwhile.
What a whole backward makes and when says what each half would have made: nothing is computed twice, and only looked at.
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
    """The node ``node`` begins with gradients in ``keys``, of ``size_bytes``: what torch keeps between the halves."""

    node: int
    keys: tuple[int, ...]
    size_bytes: int


class TowardsWeights(NamedTuple):
    """``keys`` are on their way to parameters: the first half does not make them."""

    keys: tuple[int, ...]


Event = Change | Kept | TowardsWeights


class WholeBackward:
    """Looks at one backward of ``roots`` down to ``inputs`` and ``parameters``, while ``allocations`` is on.

    Nothing is looked at where no gradient reaches an input: torch then puts all of the backward off.
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
            allocations.tell = self._events.append

    def end(self) -> HalvedBackward | None:
        """The backward is done; None where it cannot be told what its halves would hold."""
        if not self._handles:
            return None
        self._allocations.tell = None
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
        except Exception:  # whatever tensors there are: training goes on
            self._understood = False


class _Graph:
    """The nodes of a backward: those that lead to inputs, and those that lead to parameters alone.

    ``kept`` are those of the former before the latter, where torch keeps gradients, ``of_weights`` are the latter.
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
        """Parameters whose gradients are computed together, in the order in which they are.

        Of each group the size of its gradients, and the nodes (by their numbers in ``kept``) that they come from.
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
    """What the halves of the backward that went through ``events`` would hold.

    ``groups`` are the gradients of parameters in the order in which the second half makes them: how large they are,
    and the nodes that they come from.
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
    """Of what was made, by its number among ``events``, what was on its way to parameters."""
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
    """Goes through what a whole backward made, and holds what the first half of one would."""

    def __init__(self, of_weights: set[int]) -> None:
        self.held_bytes = self.most_bytes = self.released_bytes = 0
        self.kept: dict[int, dict[int, int]] = {}  # by nodes: sizes, by what was made
        self.sizes_bytes: dict[int, int] = {}  # of what nodes begin with, wherever it was made
        self.inner_bytes: dict[int, int] = {}  # the most in operators, by nodes
        self._of_weights = of_weights
        self._node = -1
        self._held: dict[int, int] = {}  # sizes by keys
        self._made: dict[int, int] = {}  # numbers by keys
        self._kept_keys: set[int] = set()
        self._stands_in: dict[int, int] = {}  # sizes of sums that were added up in memory that is kept

    def goes_on(self, number: int, event: Event) -> None:
        match event:
            case Made(key, size_bytes) if number not in self._of_weights:
                self._held[key], self._made[key] = size_bytes, number
                self._grow(size_bytes)
            case Kept(node, keys, size_bytes):
                self._node = node
                self.sizes_bytes[node] = size_bytes
                self.kept[node] = {self._made[key]: self._held[key] for key in keys if key in self._held}
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
        """What is kept is not written to: the sum is in the memory of ``source``, or in some of its own."""
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
        elif self._node < 0:  # of the graph before all that is kept, and so not needed any more
            self.released_bytes += size_bytes


def _second_half_bytes(groups: Groups, first: _FirstHalf, *, stays: bool) -> int:
    """The most in the half that computes gradients of parameters, which ``stays`` or are added to those there are."""
    uses: dict[int, int] = {}
    for _, nodes in groups:
        for node in nodes:
            for number in first.kept.get(node, {}):
                uses[number] = uses.get(number, 0) + 1
    held_bytes = most_bytes = 0
    for size_bytes, nodes in groups:
        inner_bytes = max((first.inner_bytes.get(node, 0) for node in nodes), default=0)
        if len(nodes) > 1:  # of a weight that is used several times: what is computed between its uses
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
