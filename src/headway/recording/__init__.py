"""Records a live job: observes each rank and turns what it saw into a trace."""
