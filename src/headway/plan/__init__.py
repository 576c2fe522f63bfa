"""Plan: everything decided about one job, as one readable YAML file."""

from headway.plan.plan import Plan, PlannedModel, Prediction

__all__ = ["Plan", "PlannedModel", "Prediction"]
