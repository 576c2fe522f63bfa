"""Jobs in which a pass helps, and others in which it hurts: recorded, predicted, and run with it and without."""
