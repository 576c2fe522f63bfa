"""Prediction without a trace: a model that is costed, a cluster that is described, and strategies laid over both."""
