"""Baselines of partial all-reduce: local SGD with DiLoCo, and parameter servers that wait for nobody.

``headway`` finds them by the entry points ``headway.strategies``.
"""
