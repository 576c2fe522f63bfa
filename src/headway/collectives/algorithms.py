"""The names under which a cluster holds what collectives cost, and what is known of who carries them out."""

from __future__ import annotations

GLOO_ALL_REDUCE = "gloo_all_reduce"
RING = "ring"

# ProcessGroupGloo serves its queue with two threads, in order. It does not say when one takes a collective up.
GLOO_THREADS = 2
