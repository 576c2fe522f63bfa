"""Clocks that were never compared, brought onto one by what must have come before what.

meetings_of   what ranks did together: collectives and messages, matched by name and number, never by time
fit_clocks    offsets and drifts from them, as a linear program, with an uncertainty a clock
aligned       events on the clock that others were brought onto
"""

from headway.clocks.aligning import aligned
from headway.clocks.fitting import fit_clocks
from headway.clocks.meetings import Meetings, meetings_of

__all__ = ["Meetings", "aligned", "fit_clocks", "meetings_of"]
