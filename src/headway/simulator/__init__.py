"""Plays a job: its strategy decides, every rank's steps are laid out and played, with memory and what to expect."""
