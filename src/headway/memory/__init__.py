"""Measures what forwards, backwards and updates hold in memory."""
