"""Drawing: HTML pages and text from computed values. What is computed here is only what to draw, and where."""
