"""Drawing: HTML pages and text from computed values. Nothing here computes."""
