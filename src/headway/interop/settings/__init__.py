"""Plans as settings of stock tools: one file a tool, each of which turns a plan into a value."""
