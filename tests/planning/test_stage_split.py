"""Splits into stages and placements of stages, against all there are."""

from __future__ import annotations

import random
from itertools import combinations, pairwise, permutations

import pytest

from headway.strategies.pipeline import host_order
from headway.strategies.pipeline.host_order import place
from headway.strategies.pipeline.stage_times import SplitLayer, SplitMemory, split


def some_layers(draw: random.Random, count: int) -> list[SplitLayer]:
    return [
        SplitLayer(
            f"{index}",
            forward_ns=draw.randint(1, 20),
            backward_ns=draw.randint(1, 40),
            parameter_bytes=draw.randint(0, 50),
            kept_bytes=draw.randint(0, 50),
            cut_bytes=draw.choice([None, draw.randint(1, 30), draw.randint(1, 30)]),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_a_split_is_the_best_of_all(seed: int) -> None:
    """Of unequal devices and links, and within a limit of memory."""
    draw = random.Random(seed)
    layers = some_layers(draw, draw.randint(1, 8))
    stages, micro_batches = draw.randint(1, 4), draw.randint(1, 6)
    speeds = [draw.choice([0.5, 1.0, 2.0]) for _ in range(stages)]
    rates = [draw.choice([0.5, 1.0, 8.0]) for _ in range(stages)]
    memory = draw.choice([None, SplitMemory(draw.randint(100, 600), micro_batches)])

    def passing_ns(stage: int, size_bytes: int) -> float:
        return 3 + size_bytes / rates[stage]

    def step_ns(cuts: tuple[int, ...]) -> float | None:
        spans = list(pairwise((0, *cuts, len(layers))))
        busy = [
            sum(layer.forward_ns + layer.backward_ns for layer in layers[a:b]) / speed
            for (a, b), speed in zip(spans, speeds, strict=True)
        ]
        messages = [passing_ns(stage, layers[cut - 1].cut_bytes or 0) for stage, cut in enumerate(cuts)]
        if memory:
            for stage, (a, b) in enumerate(spans):
                held = min(micro_batches, stages - stage) * sum(layer.kept_bytes for layer in layers[a:b])
                if 3 * sum(layer.parameter_bytes for layer in layers[a:b]) + held > memory.limit_bytes:
                    return None
        return sum(busy) + 2 * sum(messages) + (micro_batches - 1) * max([*busy, *messages])

    may = [index for index in range(1, len(layers)) if layers[index - 1].cut_bytes is not None]
    steps_ns = map(step_ns, combinations(may, stages - 1))
    expected = [each for each in steps_ns if each is not None]
    found = split(layers, stages, micro_batches, passing_ns, speeds=speeds, memory=memory, keep=3)
    if not expected:
        assert found == ()
        return
    steps = [each.step_ns(micro_batches) for each in found]
    assert steps == sorted(steps)
    assert steps[0] == pytest.approx(min(expected))
    for each in found:
        assert each.step_ns(micro_batches) == pytest.approx(step_ns(each.ends[:-1]))
        assert [i for stage in range(stages) for i in each.layers(stage)] == list(range(len(layers)))


def test_equal_layers_are_split_evenly() -> None:
    layers = [SplitLayer(f"{i}", 1, 2, cut_bytes=1) for i in range(12)]
    (found,) = split(layers, 4, 8, lambda _stage, _size: 0.1)
    assert found.ends == (3, 6, 9, 12)
    assert found.once_ns == pytest.approx(36.6)
    assert found.bottleneck_ns == 9


def test_a_model_that_permits_too_few_cuts() -> None:
    assert split([SplitLayer("a", 1, 1), SplitLayer("b", 1, 1)], 2, 4, lambda _stage, _size: 0.0) == ()
    with pytest.raises(ValueError, match="at least one stage"):
        split([SplitLayer("a", 1, 1)], 0, 4, lambda _stage, _size: 0.0)


def a_problem(draw: random.Random, count: int) -> tuple[list[float], list[list[float]], list[float]]:
    busy = [float(draw.randint(1, 30)) for _ in range(count)]
    hops = [[float(draw.randint(1, 40)) for _ in range(count)] for _ in range(count)]
    return busy, hops, [draw.choice([0.5, 1.0, 1.0, 2.0]) for _ in range(count)]


def step_of(
    workers: tuple[int, ...], busy: list[float], hops: list[list[float]], speeds: list[float], count: int
) -> float:
    stages = [time / speeds[worker] for time, worker in zip(busy, workers, strict=True)]
    messages = [hops[a][b] for a, b in pairwise(workers)] + [hops[b][a] for a, b in pairwise(workers)]
    return sum(stages) + sum(messages) + (count - 1) * max([*stages, *messages])


@pytest.mark.parametrize("seed", range(20))
def test_a_placement_is_the_best_of_all(seed: int) -> None:
    draw = random.Random(seed)
    busy, hops, speeds = a_problem(draw, draw.randint(1, 6))
    micro_batches = draw.randint(1, 8)
    found = place(busy, lambda _stage, a, b: hops[a][b], micro_batches, speeds=speeds)
    everyone = permutations(range(len(busy)))
    best = min(step_of(each, busy, hops, speeds, micro_batches) for each in everyone)
    assert found.step_ns(micro_batches) == pytest.approx(best)
    assert found.step_ns(micro_batches) == pytest.approx(
        step_of(found.workers, busy, hops, speeds, micro_batches)
    )


def test_local_search_comes_near_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where hops are those of two regions, a path that crosses once is found."""
    draw = random.Random(5)
    ratios = []
    for _ in range(10):
        busy, hops, speeds = a_problem(draw, 7)
        exact = place(busy, lambda _stage, a, b, h=hops: h[a][b], 8, speeds=speeds).step_ns(8)  # type: ignore[misc]
        with monkeypatch.context() as patch:
            patch.setattr(host_order, "EXACT", 0)
            near = place(busy, lambda _stage, a, b, h=hops: h[a][b], 8, speeds=speeds).step_ns(8)  # type: ignore[misc]
        ratios.append(near / exact)
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) < 1.35
    assert sorted(ratios)[5] < 1.05
    region = [draw.randrange(2) for _ in range(16)]
    found = place([1.0] * 16, lambda _stage, a, b: 1.0 if region[a] == region[b] else 9.0, 4)
    assert sum(region[a] != region[b] for a, b in pairwise(found.workers)) == 1
