"""What a job's model and optimizers permit: a plan that they do not is not run as it stands, nor predicted so."""

from __future__ import annotations

from collections.abc import Sequence

from headway.errors import UnsupportedError
from headway.job import Job
from headway.scheduling.buckets import GATHER_MODES, GatherMode
from headway.strategies.decoupled.granularity import UpdateGranularity, granularity_named
from headway.strategies.decoupled.policy import DecoupledStrategy


def permitted_forms(job: Job) -> tuple[Sequence[GatherMode], str]:
    """What decoupled strategies may gather for ``job``, and why they may not gather everything.

    An optimizer that looks at several elements at once needs whole gradients, and one that is not known to take its
    parameters one by one needs all of them before it steps: then nothing is left of forward to hide a gather under.
    Several optimizers would each gather what they have stepped, one after the other, whatever forward needs first.
    """
    if refusal := job.refusals.get(DecoupledStrategy.name):
        return (), f"{refusal}, so decoupled plans are left out"
    kinds = {name: granularity_named(name) for name in job.optimizers.names}
    whole = [name for name, kind in kinds.items() if kind is UpdateGranularity.GLOBAL]
    if whole:
        return (), f"{whole[0]} may read all gradients at once, so decoupled plans are left out"
    by_parameter = [name for name, kind in kinds.items() if kind is UpdateGranularity.PER_PARAMETER]
    if by_parameter:
        return ("gradients",), f"{by_parameter[0]} needs whole gradients, so no plan gathers parameters"
    if job.optimizers.steps_a_backward > 1:
        return ("gradients",), "several optimizers step in turn, so no plan gathers parameters"
    return GATHER_MODES, ""


def as_run(strategy: DecoupledStrategy, job: Job) -> DecoupledStrategy:
    """``strategy`` as ``job`` runs it.

    Raises UnsupportedError where nothing of a decoupled strategy would be left to hide under forward.
    """
    forms, why = permitted_forms(job)
    if strategy.gather in forms:
        return strategy
    if not forms:
        raise UnsupportedError(
            "the plan is not predicted for the recorded job",
            got=why,
            expected="a model and optimizers that the decoupled all-reduce takes",
            fix="Replay a plan of DDP.",
        )
    return strategy.model_copy(update={"gather": forms[0]})
