"""Passes: changes of a job that no strategy decides about, such as its precision. Other packages may bring some."""
