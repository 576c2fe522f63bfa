"""The bound of a step: what no plan over a cluster can beat."""

from headway.planning.bound.own import OwnBounds, form_of, least_sent_share
from headway.planning.bound.periods import Form
from headway.planning.bound.step_bound import StepBound, bound_of

__all__ = ["Form", "OwnBounds", "StepBound", "bound_of", "form_of", "least_sent_share"]
