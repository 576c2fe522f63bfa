"""Link rates from messages: only those count that had their links to themselves."""

from __future__ import annotations

import random

from headway.network.fit import _alone, _Flight


def test_messages_alone_on_their_links_are_those_that_meet_no_other() -> None:
    """Held against comparing each with every other."""
    draw = random.Random(5)
    for _ in range(2000):
        flights = []
        for _ in range(draw.randint(0, 9)):
            begin_ns = draw.randint(0, 12)
            hosts = draw.choice("abc"), draw.choice("abc")
            flights.append(_Flight(hosts, begin_ns, begin_ns + draw.randint(1, 5), 1, draw.random() < 0.8))
        expected = [
            one
            for one in flights
            if one.awaited
            and (
                one.hosts[0] == one.hosts[1]
                or not any(meet(one, other) for other in flights if other is not one)
            )
        ]
        assert list(_alone(flights)) == expected


def meet(one: _Flight, other: _Flight) -> bool:
    same = one.hosts[0] == other.hosts[0] or one.hosts[1] == other.hosts[1]
    return same and other.begin_ns < one.end_ns and one.begin_ns < other.end_ns
