"""Other tools' traces: read into ours, and ours written for them."""
