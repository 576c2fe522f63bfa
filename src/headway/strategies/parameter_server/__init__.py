"""Parameter servers on the workers themselves: gradients are pushed to them, added up, and pulled."""
