"""Exports plans as settings of other tools, one module per tool."""
