"""Tuning while training: schedules are proposed, put in force for a few steps each, measured, and the best stays."""
