"""Renders HTML pages and terminal text from diagnoses, search results and decisions.

It computes only what to draw and where; every number comes from other packages.
"""
