"""Groups of ranks along a dimension of a plan's device mesh; consecutive ranks are along the last dimension."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

Groups = tuple[tuple[int, ...], ...]


def groups_along(mesh: Mapping[str, int], dimension: str) -> Groups:
    """The groups of ranks that differ only in ``dimension``, as in ``torch.distributed.DeviceMesh``.

    ``mesh`` is the size of every dimension, the outermost first: in {"pipeline": 2, "data": 2} the groups along "data"
    are (0, 1) and (2, 3), those along "pipeline" (0, 2) and (1, 3).
    """
    sizes = tuple(mesh.values())
    ranks = np.arange(math.prod(sizes)).reshape(sizes)
    along = np.moveaxis(ranks, list(mesh).index(dimension), -1)
    return tuple(tuple(row) for row in along.reshape(-1, mesh[dimension]).tolist())
