"""Recording a live job: what is observed, and how it becomes a trace."""
