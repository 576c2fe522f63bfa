"""Recorded and made-up profiles for the tests of reading xplane.pb."""

from headway.interop.readers.foreign import ForeignRank
from profiles import (
    recorded,
)

# What is known of the jobs stands in fixtures/tensorflow/make.py and fixtures/jax/make.py.
TENSORFLOW = ("loop0", "loop1", "bare0", "fit0", "fit1")


JAX = ("single", "bare", "pair0", "pair1")


def one(name: str) -> ForeignRank:
    (rank,) = recorded(name)
    return rank
