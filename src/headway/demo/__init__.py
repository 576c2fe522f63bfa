"""The whole loop on this machine, with models and data that every machine has."""
