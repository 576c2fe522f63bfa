"""Where rows of the timeline lie: rank by rank from the top, computation above communication."""

from __future__ import annotations

from dataclasses import dataclass

from headway.report.boxes import COMMUNICATION, OPERATORS, Box

PITCH = 2.0  # from one rank to the next
_COMPUTE_HALF = 0.46
_COMMUNICATION_AT, _COMMUNICATION_HEIGHT = -0.86, 0.56
_ABOVE, _BELOW = 0.68, 1.32  # together a pitch, so that whole pixels a rank are whole pixels on the screen
_RANK_PX, _ROWS_PX, _MANY_ROWS_PX = 58, 580, 780
_LABEL_PX = 14  # what a label of a rank needs


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows for these ranks in this order. Lengths are in rows' units; 0 is the middle of the first rank's compute."""

    ranks: tuple[int, ...]
    lanes: int
    blamed: tuple[int, ...] = ()

    def places(self) -> dict[int, float]:
        """The middle of each rank's compute row."""
        return {rank: -PITCH * index for index, rank in enumerate(self.ranks)}

    def span(self, box: Box, shared: bool) -> tuple[float, float]:
        """Bottom and top of ``box``, from the middle of its rank's compute row.

        ``shared`` is whether operators are drawn in the lower half of that row.
        """
        if box.row == COMMUNICATION:
            middle, half = self.lane_at(box.lane), _COMMUNICATION_HEIGHT / self.lanes / 2
            return middle - half, middle + half
        if box.row == OPERATORS:
            return -_COMPUTE_HALF, -0.06
        return -0.02 if shared else -_COMPUTE_HALF, _COMPUTE_HALF

    def lane_at(self, lane: int) -> float:
        """The middle of a lane of communication, from the middle of its rank's compute row."""
        return _COMMUNICATION_AT + (0.5 * (self.lanes - 1) - lane) * _COMMUNICATION_HEIGHT / self.lanes

    def path_at(self, communicating: bool) -> float:
        """Where the critical path runs, from the middle of its rank's compute row."""
        return _COMMUNICATION_AT - _COMMUNICATION_HEIGHT / 2 if communicating else -_COMPUTE_HALF

    @property
    def band(self) -> tuple[float, float]:
        """Bottom and top of all that belongs to a rank, from the middle of its compute row."""
        return -PITCH + 0.7, 0.64

    @property
    def y_range(self) -> tuple[float, float]:
        """From the lowest row's end to the highest's."""
        return -PITCH * (len(self.ranks) - 1) - _BELOW, _ABOVE

    @property
    def rank_px(self) -> int:
        """How high one rank is drawn: whole pixels, or rows would come out uneven."""
        most = _ROWS_PX if len(self.ranks) <= 64 else _MANY_ROWS_PX
        return max(min(_RANK_PX, most // len(self.ranks)), 1)

    @property
    def dense(self) -> bool:
        """Whether rows are too low for borders and thick lines."""
        return self.rank_px < 20

    @property
    def height_px(self) -> int:
        """How high all are drawn, without the axes."""
        return self.rank_px * len(self.ranks)

    def labels(self) -> list[tuple[float, str]]:
        """Which rows are labelled, and how. The blamed ranks always are; others where there is room."""
        places = self.places()
        every = -(-_LABEL_PX // self.rank_px)
        marked = [index for index, rank in enumerate(self.ranks) if rank in self.blamed]
        found = []
        for index, rank in enumerate(self.ranks):
            if index in marked:
                found.append((places[rank], f"▸ rank {rank}"))
            elif index % every == 0 and all(abs(index - mark) >= every for mark in marked):
                found.append((places[rank], f"rank {rank}"))
            if self.rank_px >= 2.4 * _LABEL_PX:
                found.append((places[rank] + _COMMUNICATION_AT, "network"))
        return found
