"""Predicted against measured: what is run, on which lab, and how it is predicted."""
