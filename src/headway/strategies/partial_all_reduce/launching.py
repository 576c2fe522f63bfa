"""Launching: a coordinator that a launcher keeps while its job runs, so that no worker has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from headway.coordination.service.child import CoordinatorProcess, from_environment
from headway.coordination.service.generator_choice import GeneratorChoice
from headway.strategies.partial_all_reduce.policy import PartialAllReduceStrategy


@contextmanager
def coordinator(strategy: PartialAllReduceStrategy) -> Iterator[Mapping[str, str]]:
    """Serve workers on this host while the block runs; gives the variables by which they find it.

    None where the environment names a coordinator already. Raises LaunchError where it does not start.
    """
    if from_environment() is not None:
        yield {}
        return
    process = CoordinatorProcess(choice_of(strategy))
    try:
        yield process.environment()
    finally:
        process.close()


def choice_of(strategy: PartialAllReduceStrategy) -> GeneratorChoice:
    """Who forms the groups of ``strategy``, which are not static."""
    return GeneratorChoice(strategy.groups, strategy.generator_options, strategy.seed)
