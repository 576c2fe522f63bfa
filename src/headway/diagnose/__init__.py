"""Where the step time went, and who is to blame."""
