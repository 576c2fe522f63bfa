"""Tunes a pipeline's order during training, by the network rates that its own messages show."""
