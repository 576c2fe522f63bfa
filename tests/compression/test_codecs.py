from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from headway.compression.cast import Cast
from headway.compression.codec import Codec, Gradients
from headway.compression.int8 import LARGEST, Int8
from headway.compression.power_sgd import PowerSGD, matrix_shape, orthonormal
from headway.compression.registry import codecs, proposed
from headway.compression.top_k import TopK
from headway.ext.testing import (
    SHAPES,
    Simulation,
    check_codec,
    check_exchanges,
    check_feedback,
    check_not_finite,
    example_gradients,
    reduced,
)

NUMEL = sum(math.prod(shape) for shape in SHAPES)
CODECS = (
    *proposed(), Cast(dtype="float16", error_feedback=True), Cast(dtype="float64"), Int8(block=16),
    Int8(error_feedback=False), TopK(share=1.0), TopK(share=1e-9), TopK(error_feedback=False), PowerSGD(rank=1),
    PowerSGD(rank=200),
)  # fmt: skip
FED_BACK = [
    each for each in CODECS if each.feeds_back and each != PowerSGD(rank=200)
]  # which sends all as it is


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.describe())
def test_what_is_sent_is_what_was_decided_and_all_ranks_get_the_same(
    codec: Codec, world_size: int, dtype: str
) -> None:
    check_exchanges(codec, world_size, dtype)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("codec", FED_BACK, ids=lambda codec: codec.describe())
def test_what_was_sent_and_what_is_kept_add_up_to_the_gradients(codec: Codec, world_size: int) -> None:
    # What sums of a cast lose by rounding is not fed back: that is as much as half a unit in the last place a sum.
    check_feedback(codec, world_size, rounding=2**-10 if isinstance(codec, Cast) else 0.0)


def int8_by_numpy(x: np.ndarray, block: int) -> np.ndarray:
    """What integers of ``x`` stand for."""
    padded = np.zeros(-(-len(x) // block) * block, dtype=np.float32)
    padded[: len(x)] = x
    rows = padded.reshape(-1, block)
    scales = (np.abs(rows).max(axis=1, keepdims=True) / LARGEST).astype(np.float32)
    integers = np.rint(rows / np.where(scales > 0, scales, 1)).clip(-LARGEST, LARGEST)
    return np.asarray(integers * scales, dtype=np.float32).reshape(-1)[: len(x)]


def test_int8_rounds_blocks_as_numpy_does() -> None:
    codec = Int8(block=64)
    ranks = example_gradients(2)
    ranks[0].flat[:64] = 0  # a block of zeros
    flats = [each.flat.numpy().copy() for each in ranks]
    done, _ = reduced(codec, ranks)
    expected = (int8_by_numpy(flats[0], 64) + int8_by_numpy(flats[1], 64)) / 2
    assert np.array_equal(done[0].mean.numpy(), expected)
    assert np.allclose(done[1].kept.numpy(), flats[1] - int8_by_numpy(flats[1], 64), atol=1e-6)


def test_int8_in_shares_rounds_the_mean_once_more() -> None:
    codec, ranks = Int8(block=64), example_gradients(4)
    share = codec.share_numel(NUMEL, 4)
    flats = [np.pad(each.flat.numpy(), (0, 4 * share - NUMEL)) for each in ranks]
    done, _ = reduced(codec, ranks)
    total = sum(int8_by_numpy(flat, 64) for flat in flats)
    assert np.allclose(
        done[0].mean.numpy(), int8_by_numpy(np.asarray(total) / np.float32(4), 64)[:NUMEL], atol=1e-6
    )


def test_int8_takes_the_collective_with_fewer_bytes() -> None:
    """Each rank sends (P - 1) rows of a gather, a Pth of it each time of two exchanges of shares."""
    for world_size in range(2, 20):
        found = Int8().exchanges([(2**20,)], "float32", world_size)
        sent = sum(each.size_bytes for each in found) * (world_size - 1) / world_size
        gathered = Int8().sent_bytes(2**20) * (world_size - 1)
        in_shares = 2 * Int8().sent_bytes(2**20) * (world_size - 1) / world_size
        assert sent == pytest.approx(min(gathered, in_shares), rel=0.02)


def test_top_k_sends_the_largest_as_numpy_finds_them() -> None:
    codec, ranks = TopK(share=0.05), example_gradients(3)
    flats = [each.flat.numpy().copy() for each in ranks]
    done, _ = reduced(codec, ranks)
    total = np.zeros(NUMEL, dtype=np.float32)
    for rank, flat in enumerate(flats):
        largest = np.argsort(-np.abs(flat))[: codec.count(NUMEL)]
        total[largest] += flat[largest]
        rest = flat.copy()
        rest[largest] = 0
        assert np.array_equal(done[rank].kept.numpy(), rest)
    assert np.allclose(done[0].mean.numpy(), total / 3, atol=1e-6)


def power_sgd_by_numpy(matrices: Sequence[np.ndarray], q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Algorithm 1 of the paper: what is decoded, and the next Q."""
    basis, _ = np.linalg.qr(np.mean([m @ q for m in matrices], axis=0))
    following = np.mean([m.T @ basis for m in matrices], axis=0)
    return basis @ following.T, following


def test_power_sgd_iterates_as_the_paper_says() -> None:
    codec, ranks = PowerSGD(rank=2), example_gradients(3, dtype="float64")
    matrices = [each.flat[:1200].view(40, 30).numpy().copy() for each in ranks]
    q = codec._directions(ranks[0], 0, ranks[0].flat[:1200].view(40, 30), 2).numpy()
    for _ in range(4):
        done, _ = reduced(codec, ranks)
        expected, q = power_sgd_by_numpy(matrices, q)
        assert np.allclose(done[0].mean[:1200].view(40, 30).numpy(), expected, atol=1e-12)
        assert np.allclose(ranks[1].memory[0].numpy(), q, atol=1e-12)
    plain = torch.stack([each.flat[1200:1207] for each in ranks]).mean(0)
    assert torch.allclose(done[0].mean[1200:1207], plain), "vectors are sent as they are"


def test_power_sgd_finds_what_has_its_rank() -> None:
    left, right = torch.randn(40, 3, dtype=torch.float64), torch.randn(30, 3, dtype=torch.float64)
    flat = (left @ right.T).reshape(-1)
    for world_size in (1, 2):
        ranks = [Gradients(flat, [(40, 30)], [0], rank, world_size) for rank in range(world_size)]
        done, _ = reduced(PowerSGD(rank=3), ranks)
        assert torch.allclose(done[0].mean, flat, atol=1e-9)


@pytest.mark.parametrize("before", [1, 4])
def test_power_sgd_goes_on_under_another_rank(before: int) -> None:
    ranks = example_gradients(2, dtype="float64")
    reduced(PowerSGD(rank=before), ranks)
    kept = ranks[0].memory[0][:, : min(2, before)].clone()
    directions = PowerSGD(rank=2)._directions(ranks[0], 0, ranks[0].flat[:1200].view(40, 30), 2)
    assert directions.shape == (30, 2)
    assert torch.equal(directions[:, : min(2, before)], kept)
    assert bool(directions.any(dim=0).all())
    reduced(PowerSGD(rank=2), ranks)
    assert ranks[0].memory[0].shape == (30, 2)


def test_power_sgd_comes_back_from_gradients_of_zero() -> None:
    simulation = Simulation(PowerSGD(rank=2), [(40, 30)], 2, torch.float64)
    nothing, something = torch.zeros(1200, dtype=torch.float64), torch.randn(1200, dtype=torch.float64)
    assert not simulation.step([nothing, nothing]).any()
    assert simulation.step([something, something]).any()


def test_power_sgd_sends_what_would_not_get_smaller_as_it_is() -> None:
    codec = PowerSGD(rank=4)
    ranks = {(): 0, (100,): 0, (8, 8): 0, (40, 30): 4, (64, 32, 3, 3): 4, (3, 0): 0, (2, 1000): 0}
    assert {shape: codec.rank_of(shape) for shape in ranks} == ranks
    assert matrix_shape((64, 32, 3, 3)) == (64, 288)
    assert torch.allclose(orthonormal(torch.zeros(5, 2)).T @ orthonormal(torch.zeros(5, 2)), torch.eye(2))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.describe())
def test_what_is_not_finite_is_seen_by_all(codec: Codec) -> None:
    check_not_finite(codec)


def test_a_codec_is_checked_in_one_call() -> None:
    check_codec(Int8(), (2,))


def test_halves_are_divided_before_they_are_cast() -> None:
    large = [Gradients(torch.full((4,), 60_000.0), [(4,)], [0], rank, 4) for rank in range(4)]
    done, _ = reduced(Cast(dtype="float16"), large)
    assert torch.equal(done[0].mean, torch.full((4,), 60_000.0).half().float())


def test_codecs_are_found_by_name_and_say_what_they_do() -> None:
    assert list(codecs()) == ["cast", "int8", "top-k", "power-sgd"]
    for each in CODECS:
        assert codecs()[each.name].model_validate(each.model_dump(mode="json")) == each
        assert each.describe()
        assert each.loses
    assert len({each.cost_name for each in proposed()}) == len(proposed())
