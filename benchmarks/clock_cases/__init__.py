"""Jobs on clocks with injected offsets and drifts, for `clock_recovery.py`: synthetic ones and real recordings."""
