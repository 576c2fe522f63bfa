"""Other tools: their traces read into ours, ours written for them, and plans as their settings."""
