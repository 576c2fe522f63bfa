"""Recording a job, aligning clocks, and the trace on disk."""
