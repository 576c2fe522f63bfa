"""Drawing: HTML pages from computed values. Nothing here computes."""
