"""Error feedback: what was not sent of each parameter's gradients, kept for the next step (Karimireddy et al., 2019).

It is kept by parameter. A bucket works on a flat tensor of its own, as gradients lie in it, and the parameters' parts
are views of that; where DDP has cut its buckets anew, the parts move to new flat tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


class Feedback:
    """What this rank keeps, by the keys of parameters, and what codecs remember of them (``memory``)."""

    def __init__(self) -> None:
        self.memory: dict[int, torch.Tensor] = {}
        self._parts: dict[int, torch.Tensor] = {}
        self._flats: dict[tuple[int, ...], torch.Tensor] = {}

    def of(self, keys: Sequence[int], numels: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """What is kept of a bucket's parameters, behind each other, to be changed in place; zeros at first."""
        together = tuple(keys)
        flat = self._flats.get(together)
        if flat is not None and flat.dtype == dtype and flat.numel() == sum(numels):
            return flat
        flat = torch.zeros(sum(numels), dtype=dtype)
        for known in [known for known in self._flats if set(known) & set(together)]:
            del self._flats[known]  # parts that stay behind are views that keep it
        for key, part in zip(keys, flat.split(list(numels)), strict=True):
            if key in self._parts:
                part.copy_(self._parts[key])
            self._parts[key] = part
        self._flats[together] = flat
        return flat

    def forget(self, keys: Sequence[int]) -> None:
        """Begin anew with these parameters."""
        for key in keys:
            self.memory.pop(key, None)
            if key in self._parts:
                self._parts[key].zero_()

    def forget_all(self) -> None:
        """Begin anew with all parameters."""
        self.forget([*{*self.memory, *self._parts}])

    def kept(self) -> dict[int, torch.Tensor]:
        """A copy of what is kept, flat, by key."""
        return {key: part.clone() for key, part in self._parts.items()}

    def restore(self, kept: Mapping[int, torch.Tensor], memory: Mapping[int, torch.Tensor]) -> None:
        """Go on from what ``kept`` and ``memory`` were elsewhere."""
        self._flats.clear()
        self._parts = {key: part.clone() for key, part in kept.items()}
        self.memory = {key: own.clone() for key, own in memory.items()}
