"""Process groups that communicate while a rank is recorded: their names, and who is in them."""

from __future__ import annotations

import torch.distributed as dist

from headway import torch_private


class GroupWatch:
    """Who is in the groups that this rank was seen to use; ``members`` are the ranks of those that lack some rank."""

    def __init__(self) -> None:
        self.members: dict[str, tuple[int, ...]] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}

    def name_of(self, group: dist.ProcessGroup) -> str:
        """The name of ``group``, which is noted."""
        name = torch_private.group_name(group)
        if name not in self._ranks:
            self._note(name, group)
        return name

    def rank_of(self, group: dist.ProcessGroup, index: int) -> int:
        """The rank in the job of the member ``index`` of ``group``; -1 where that is not known."""
        ranks = self._ranks[self.name_of(group)]
        return ranks[index] if 0 <= index < len(ranks) else -1

    def _note(self, name: str, group: dist.ProcessGroup) -> None:
        try:
            ranks = tuple(dist.get_process_group_ranks(group))
        except (KeyError, ValueError):  # a group that torch.distributed did not make
            ranks = ()
        self._ranks[name] = ranks
        if 0 < len(ranks) < dist.get_world_size():
            self.members[name] = ranks
