"""Type aliases for numpy arrays, by element type."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]
Texts = npt.NDArray[np.object_]
