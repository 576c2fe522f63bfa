"""Aligns the clocks of ranks by causality: nobody leaves a collective before all members have entered it.

meetings_of   finds what ranks did together: collectives and messages, matched by name and number, never by time
fit_clocks    computes each clock's offset, drift and uncertainty from these, by a linear program
aligned       converts a rank's events to the reference clock
"""

from headway.clocks.aligning import aligned
from headway.clocks.fitting import fit_clocks
from headway.clocks.meetings import Meetings, meetings_of

__all__ = ["Meetings", "aligned", "fit_clocks", "meetings_of"]
