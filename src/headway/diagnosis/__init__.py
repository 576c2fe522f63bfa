"""Where the step time went, and who is to blame."""

from __future__ import annotations

from headway.diagnosis.diagnosis import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]
