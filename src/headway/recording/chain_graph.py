"""The autograd graph behind a chain of modules: which parameters each uses, and that there is no way around one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class NoChainError(Exception):
    """A model is not a chain; the message says why."""


def parameters_between(nodes: Sequence[Any], ends: Sequence[Any]) -> list[frozenset[int]]:
    """The ids of the parameters that are used up to each of ``nodes``, and from the last of them to ``ends``.

    A node is that of the tensor that a module hands on. Raises NoChainError where a gradient goes around one.
    """
    handed_on = set(nodes)
    before: set[Any] = set()  # nodes of what follows; holding them keeps their wrappers the same
    found: list[frozenset[int]] = []
    for place in range(len(nodes), -1, -1):
        starts = set(ends) if place == len(nodes) else {nodes[place]}
        stop = {nodes[place - 1]} if place else set()
        own, parameters = _reached(starts, stop)
        if own & before or (own - starts) & handed_on:
            raise NoChainError("a tensor goes around some module to a later one")
        before |= own
        found.append(parameters)
    return found[::-1]


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
        left += [each for each, _ in node.next_functions]
    return seen, frozenset(parameters)
