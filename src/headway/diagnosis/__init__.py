"""Finds where step time goes in a recorded job, which ranks and links slow it down, and what to do about it."""

from __future__ import annotations

from headway.diagnosis.diagnosis import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]
