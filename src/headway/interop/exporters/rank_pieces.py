"""What is said of each event of one rank: its track, its name, its annotations, its arrows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from headway.arrays import Ints
from headway.interop.exporters.arrows import Arrows
from headway.interop.exporters.packets import Column, merged
from headway.interop.exporters.rank_tracks import RankTracks, clean
from headway.trace.events import OPTIONAL_COLUMNS, Events, Kind, is_absent

NUMBERS = {  # of an annotation, and the column that it says where that is not below zero
    "bytes": "size_bytes",
    "bucket": "bucket",
    "peer": "peer",
    "sequence": "sequence",
}
TEXTS = ("group", "algorithm")


class RankPieces:
    """The names of one rank, each said once, and the columns of pieces that its packets are made of.

    ``communication`` are the rows of ``arrows.rows`` that are this rank's. The rank's tracks are numbered from
    ``first_uuid`` on. Times in annotations are ``origin_ns`` less than in the trace, as those of packets are.
    """

    def __init__(
        self,
        messages: Any,
        events: Events,
        tracks: RankTracks,
        arrows: Arrows,
        communication: Ints,
        *,
        first_uuid: int,
        origin_ns: int,
    ) -> None:
        self._messages = messages
        self._tracks = tracks
        self._arrows = arrows
        self._communication = communication
        self._first_uuid = first_uuid
        self._origin_ns = origin_ns
        self._step = events.step
        present = [name for name in OPTIONAL_COLUMNS if not is_absent(getattr(events, name))]
        self._numbers = NUMBERS | dict(zip(present, present, strict=True))
        told = events.enqueue_ns != -1
        for column in self._numbers.values():
            told |= getattr(events, column) >= 0
        for column in TEXTS:
            told |= getattr(events, column) != ""
        told[arrows.event[communication]] = True
        self._told = np.flatnonzero(told)  # the events of which there is more to say than their step
        self._more = events.where(told)
        self._categories = _numbered(kind for kind, _ in tracks.labels)
        self._titles = _numbered(title for _, title in tracks.labels)
        self._annotations = _numbered(("step", *self._numbers, "enqueue_ns", *TEXTS, "last_rank"))
        self._texts = _numbered(text for name in TEXTS for text in getattr(self._more, name).tolist())

    def intern(self, data: Any) -> None:
        """Say every name in ``data``, an InternedData; packets refer to names by number."""
        for said, field in (
            (self._categories, data.event_categories),
            (self._titles, data.event_names),
            (self._annotations, data.debug_annotation_names),
        ):
            for text, number in said.items():
                field.add(iid=number, name=clean(text))
        for text, number in self._texts.items():
            data.debug_annotation_string_values.add(iid=number, str=clean(text).encode())

    def columns(self) -> list[Column]:
        """The columns of this rank's events and, behind them, of one end of a slice for each track."""
        ends = len(self._tracks.names)
        more = merged([*self._annotation_columns(), *self._arrow_columns()])
        index = np.zeros(len(self._step), dtype=np.int64)
        index[self._told] = more.index
        return [
            self._moves(),
            self._labels().followed_by(ends),
            self._number("step", self._step, self._step >= 0).followed_by(ends),
            Column(more.pieces, more.sizes, index).followed_by(ends),
        ]

    def _moves(self) -> Column:
        """What happens and on which track."""
        event = self._messages.TrackEvent
        pieces = [
            self._piece(type=kind, track_uuid=self._first_uuid + number)
            for number in range(len(self._tracks.names))
            for kind in (
                event.TYPE_INSTANT if number == self._tracks.instants else event.TYPE_SLICE_BEGIN,
                event.TYPE_SLICE_END,
            )
        ]
        ends = 2 * np.arange(len(self._tracks.names)) + 1
        return Column.of(pieces, np.append(2 * self._tracks.track, ends))

    def _labels(self) -> Column:
        pieces = [
            self._piece(
                category_iids=[self._categories[kind]] if kind else [], name_iid=self._titles.get(title)
            )
            for kind, title in self._tracks.labels
        ]
        return Column.of([b"", *pieces], self._tracks.label + 1)

    def _annotation_columns(self) -> list[Column]:
        asked = self._more.enqueue_ns
        columns = [self._number("enqueue_ns", asked - self._origin_ns, asked != -1)]
        for name, column in self._numbers.items():
            values = getattr(self._more, column)
            columns.append(self._number(name, values, values >= 0))
        columns.extend(self._text(name, getattr(self._more, name).tolist()) for name in TEXTS)
        return columns

    def _arrow_columns(self) -> list[Column]:
        """The rank that arrived last, what else is the same communication, and the arrows that begin or end here."""
        arrows, own = self._arrows, self._communication
        at = np.searchsorted(self._told, arrows.event[own])
        several = arrows.members[own] > 1
        last, same = (np.full(len(self._told), -1, dtype=np.int64) for _ in range(2))
        collective = several & (arrows.rows.kind[own] == Kind.COLLECTIVE)
        last[at[collective]] = arrows.rows.last_rank[own][collective]
        same[at[several]] = arrows.rows.instance[own][several] + 1
        return [
            self._number("last_rank", last, last >= 0),
            Column.of_values(same, same >= 0, lambda value: self._piece(correlation_id=value)),
            self._arrow_ends(arrows.cause, np.arange(len(arrows.cause)), at, "flow_ids"),
            self._arrow_ends(arrows.effect, np.flatnonzero(arrows.on_start), at, "terminating_flow_ids"),
        ]

    def _arrow_ends(self, rows: Ints, numbers: Ints, at: Ints, field: str) -> Column:
        """The ends, at this rank's events, of the arrows with these ``numbers``, which end at ``rows``."""
        index = np.zeros(len(self._told), dtype=np.int64)
        ends = rows[numbers]
        place = np.searchsorted(self._communication, ends)
        mine = place < len(self._communication)
        mine[mine] = self._communication[place[mine]] == ends[mine]
        order = np.argsort(place[mine], kind="stable")
        places, flows = place[mine][order], numbers[mine][order] + 1
        found, firsts = np.unique(places, return_index=True)
        index[at[found]] = np.arange(1, len(found) + 1)
        groups = np.split(flows, firsts[1:]) if len(found) else []
        return Column.of([b"", *(self._piece(**{field: group.tolist()}) for group in groups)], index)

    def _number(self, name: str, values: Ints, present: Any) -> Column:
        return Column.of_values(values, present, lambda value: self._annotation(name, int_value=value))

    def _text(self, name: str, texts: list[str]) -> Column:
        numbers = np.array([self._texts.get(text, 0) for text in texts], dtype=np.int64)
        return Column.of_values(
            numbers, numbers > 0, lambda number: self._annotation(name, string_value_iid=number)
        )

    def _annotation(self, name: str, **value: int) -> bytes:
        said = self._messages.DebugAnnotation(name_iid=self._annotations[name], **value)
        return self._piece(debug_annotations=[said])

    def _piece(self, **fields: Any) -> bytes:
        content: bytes = self._messages.TrackEvent(**fields).SerializeToString()
        return content


def _numbered(texts: Iterable[str]) -> dict[str, int]:
    """Each text's number, from 1; 0 stands for none."""
    return {text: number for number, text in enumerate(dict.fromkeys(text for text in texts if text), 1)}
