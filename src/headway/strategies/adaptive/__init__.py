"""Adaptive training: what does a model's steps is chosen by measurement while it trains.

``wrapper`` is the wrapped model, ``tuner`` tries candidates, ``proposer`` decides which, ``adapter`` when to try again.
"""
