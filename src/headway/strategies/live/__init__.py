"""What the runtimes of several strategies share: channels, counted steps, averaged state, checks of the model."""
