"""The planner of decoupled schedules: ``search`` improves ``drafts``, which the ``surrogate`` predicts."""
