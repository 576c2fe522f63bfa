"""Chooses among data-parallel strategies while the job trains: tuner, adapter, hand-over between runtimes."""
