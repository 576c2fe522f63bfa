"""Computes a lower bound of the step that no plan on a cluster can beat."""

from headway.bound.periods import Form
from headway.bound.step_bound import PlanBounds, StepBound, bound_of, form_of, least_sent_share

__all__ = ["Form", "PlanBounds", "StepBound", "bound_of", "form_of", "least_sent_share"]
