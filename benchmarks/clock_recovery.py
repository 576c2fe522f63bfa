"""How well clocks are recovered whose offsets and drifts were injected, and how honest the reported uncertainty is.

    python benchmarks/clock_recovery.py [--quick] [--only CASE] [--json FILE]

Synthetic jobs have true times by construction; real recordings are made on one machine, whose ranks read one clock.
Both are then shown on clocks that are wrong by up to 50 ms and 50 ppm, one a host, and aligned from causality alone (or
with round trips besides). An error is the largest one between the first and the last event of the job.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from clock_cases.injected import averaged, between_ends_us, random_clocks, round_trips
from clock_cases.recorded import Recording, possible, record
from clock_cases.synthetic import Job
from common import parse_arguments, report

from headway.clocks import fit_clocks, meetings_of
from headway.trace.events import Events
from headway.trace.format import ClockFit

RUNS, QUICK_RUNS = 10, 2
Draw = Callable[[np.random.Generator], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """Jobs of one kind: ``words`` say what is special, ``draw`` makes a job's options."""

    words: str
    draw: Draw
    trips: bool = False


def _usual(random: np.random.Generator, **options: Any) -> dict[str, Any]:
    usual = {
        "hosts": int(random.integers(2, 17)),
        "seconds": random.uniform(2, 60),
        "jitter_us": float(np.exp(random.uniform(np.log(5), np.log(200)))),
        "seed": int(random.integers(2**31)),
    }
    return usual | options


SYNTHETIC = {
    "steady": Case("ends late by 5 to 50 us", lambda r: _usual(r, jitter_us=r.uniform(5, 50))),
    "noisy": Case(
        "ends late by 100 to 500 us, 3 % by up to a hundred times that",
        lambda r: _usual(r, jitter_us=r.uniform(100, 500), outliers=0.03),
    ),
    "straggler": Case(
        "one host always comes 5 to 50 ms late", lambda r: _usual(r, straggler_ms=r.uniform(5, 50))
    ),
    "first-through": Case(
        "rank 0 is always through 100 us before the others", lambda r: _usual(r, early_us=100.0)
    ),
    "large-only": Case(
        "no small collectives, and rank 0 through up to 300 us before the others",
        lambda r: _usual(r, loss_us=0.0, early_us=r.uniform(0, 300)),
    ),
    "eight-ranks-a-host": Case(
        "two to four hosts of eight ranks",
        lambda r: _usual(r, hosts=int(r.integers(2, 5)), ranks_a_host=8, seconds=r.uniform(2, 30)),
    ),
    "misnumbered": Case("3 % of collectives carry a wrong number", lambda r: _usual(r, mistaken=0.03)),
    "pipeline": Case(
        "messages between neighbours only", lambda r: _usual(r, hosts=int(r.integers(2, 9)), pipeline=True)
    ),
    "with-round-trips": Case(
        "as large-only, and round trips of 100 to 600 us before and after",
        lambda r: _usual(r, loss_us=0.0, early_us=r.uniform(0, 300)),
        trips=True,
    ),
}
RECORDED = {
    "recorded-2": Recording(2, 300),
    "recorded-3": Recording(3, 250),
    "recorded-4": Recording(4, 200),
    "recorded-lab-2": Recording(2, 120, 500, "400mbit"),
    "recorded-lab-4": Recording(4, 100, 500, "400mbit"),
}
WORDS = {name: case.words for name, case in SYNTHETIC.items()} | {
    name: f"{one.ranks} ranks of DDP over Gloo, really recorded"
    + (f", links of {one.rate}" if one.rate else ", on loopback")
    for name, one in RECORDED.items()
}


def main() -> None:
    arguments = parse_arguments(__doc__ or "", [*SYNTHETIC, *RECORDED])
    runs = QUICK_RUNS if arguments.quick else RUNS
    rows = []
    for name in [arguments.only] if arguments.only else [*SYNTHETIC, *RECORDED]:
        made = _synthetic(name, runs) if name in SYNTHETIC else _recorded(name, runs)
        rows += [{"case": name, **row} for row in made]
    report("clock_recovery", rows, arguments, INTRODUCTION, _page)


def _synthetic(name: str, runs: int) -> Iterator[dict[str, Any]]:
    case = SYNTHETIC[name]
    for number in range(runs):
        random = np.random.default_rng([list(SYNTHETIC).index(name), number])
        job = Job(**case.draw(random))
        yield _run(job.events(), job.clock_of_rank, random, trips=case.trips)


def _recorded(name: str, runs: int) -> Iterator[dict[str, Any]]:
    if not possible(RECORDED[name]):
        print(f"{name}: left out, for this machine permits no lab")
        return
    with tempfile.TemporaryDirectory() as folder:
        events = record(RECORDED[name], Path(folder))
    clock_of_rank = {rank: f"host{rank}" for rank in events}
    for number in range(runs):
        yield _run(events, clock_of_rank, np.random.default_rng(number))


def _run(
    events: Mapping[int, Events],
    clock_of_rank: Mapping[int, str],
    random: np.random.Generator,
    *,
    trips: bool = False,
) -> dict[str, Any]:
    """One injection. Errors and uncertainties are lists, an entry for each clock but the first."""
    ends_ns = np.array(
        [min(own.start_ns.min() for own in events.values()), max(own.end_ns.max() for own in events.values())]
    )
    clocks = random_clocks(list(dict.fromkeys(clock_of_rank.values())), int(ends_ns[0]), random)
    shown = {rank: clocks[clock_of_rank[rank]].read(own) for rank, own in events.items()}
    prior = {name: round_trips(clock, ends_ns, random) for name, clock in clocks.items()} if trips else {}
    fits = fit_clocks(meetings_of(shown, clock_of_rank), list(clocks), prior=prior)
    means = averaged(shown, clock_of_rank)

    def errors_us(found: Mapping[str, ClockFit]) -> list[float]:
        return [round(clocks[name].error_ns(ends_ns, found[name]) / 1e3, 1) for name in list(clocks)[1:]]

    row = {
        "clocks": len(clocks),
        "ranks": len(events),
        "seconds": round(float(ends_ns[1] - ends_ns[0]) / 1e9, 3),
        "ends_apart_us": round(between_ends_us(events), 1),
        "error_us": errors_us(fits),
        "uncertainty_us": [round(fits[name].uncertainty_ns / 1e3, 1) for name in list(clocks)[1:]],
        "unaligned_us": errors_us(dict.fromkeys(clocks, ClockFit())),
        "averages_us": errors_us(means) if means else [],
    }
    return row | ({"round_trips_us": errors_us(prior)} if prior else {})


INTRODUCTION = (
    "How wrong clocks are after alignment, at most between the first and the last event of a job (us). Offsets of up "
    "to ±50 ms and drifts of up to ±50 ppm were injected, a clock a host. `ends apart` is the jitter of networks and "
    "hosts: the median over collectives of how long after its first member the last one ends, in true time (of "
    "messages, how long they are in flight). `uncertainty` is what Headway reports; `covered`, how often the error is "
    "within it. `averages`: each host's mean difference of ends and no drift, as dPRO's release aligns. `unaligned`: "
    "as recorded. Synthetic jobs last 2 to 60 s on 2 to 16 hosts, with 150 us all-reduces of a loss and 2 and 6 ms "
    "ones of gradients; ends are late by a lognormal time, of 5 to 200 us in the median where nothing else is said, "
    "and 1 % of them by ten to a hundred times as much. Recordings, one a case, are of one machine with fewer cores "
    "than they need: there ends are apart by what ranks wait for a core."
)


def _page(name: str, document: dict[str, Any], words: str) -> str:
    rows = document["rows"]
    lines = [
        f"# {name}", "", words, "",
        "| case | runs | clocks | ends apart | error median | p95 | max | uncertainty median | max | covered "
        "| averages median | p95 | unaligned median |",
        "|" + "---|" * 13,
    ]  # fmt: skip
    cases = dict.fromkeys(row["case"] for row in rows)
    lines += [_line(case, [row for row in rows if row["case"] == case]) for case in cases]
    lines.append(_line("all", rows))
    trips = [us for row in rows for us in row.get("round_trips_us", [])]
    lines += ["", *(f"- {case}: {WORDS[case]}" for case in cases)]
    if trips:
        lines.append(
            f"- round trips alone: median {np.median(trips):.0f} us, p95 {np.percentile(trips, 95):.0f} us"
        )
    lines += ["", ", ".join(f"{key} {value}" for key, value in document["environment"].items()), ""]
    return "\n".join(lines)


def _line(case: str, rows: list[dict[str, Any]]) -> str:
    errors, uncertainties, averages, unaligned = (
        np.array([us for row in rows for us in row[column]])
        for column in ("error_us", "uncertainty_us", "averages_us", "unaligned_us")
    )
    cells = [
        case, str(len(rows)), str(len(errors)), f"{np.median([row['ends_apart_us'] for row in rows]):.0f}",
        *(f"{value:.0f}" for value in (np.median(errors), np.percentile(errors, 95), errors.max())),
        f"{np.median(uncertainties):.0f}", f"{uncertainties.max():.0f}", f"{(errors <= uncertainties).mean():.1%}",
        *((f"{np.median(averages):.0f}", f"{np.percentile(averages, 95):.0f}") if len(averages) else ("", "")),
        f"{np.median(unaligned):.0f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
