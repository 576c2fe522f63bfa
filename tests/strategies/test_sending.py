"""What becomes of a bucket whose codec, of another package, does not do what codecs do: the error names it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, ClassVar, Literal

import pytest
import torch

from headway.collectives.algorithms import ALL_REDUCE
from headway.compression.cast import Cast
from headway.compression.codec import Gradients, Reduced, Sent
from headway.errors import PluginError
from headway.strategies.ddp.compressed import Outgoing, send

Reducing = Callable[[torch.Tensor], Generator[Any, torch.Tensor, Any]]


class Foreign(Cast):
    name: ClassVar[str] = "foreign"
    codec: Literal["foreign"] = "foreign"  # type: ignore[assignment]
    reducing: ClassVar[Reducing]

    def reduce(self, gradients: Gradients) -> Any:
        return type(self).reducing(gradients.flat)


def ends_with(made: Callable[[torch.Tensor], Any]) -> Reducing:
    def reducing(flat: torch.Tensor) -> Generator[Any, torch.Tensor, Any]:
        mean = yield Sent(ALL_REDUCE, flat.clone())
        return made(mean)

    return reducing


def sends(what: Any) -> Reducing:
    def reducing(_: torch.Tensor) -> Generator[Any, torch.Tensor, Any]:
        yield what

    return reducing


def fails(mean: torch.Tensor) -> Any:
    raise KeyError("planted")


CASES: dict[str, tuple[Any, str]] = {
    "shorter": (ends_with(lambda mean: Reduced(mean[:-1], mean)), "the mean has 5 elements, expected 6"),
    "row": (ends_with(lambda mean: Reduced(mean.view(1, -1), mean)), r"the mean has the shape \(1, 6\), expected 6"),
    "kept": (ends_with(lambda mean: Reduced(mean, mean[:3])), "what is kept has 3 elements, expected 6"),
    "none": (ends_with(lambda _: None), r"reduce\(\) returned NoneType, expected Reduced"),
    "fails": (ends_with(fails), "it raised KeyError: 'planted'"),
    "bare": (sends(torch.ones(6)), r"reduce\(\) yielded Tensor, expected Sent"),
    "kind": (sends(Sent("broadcast", torch.ones(6))), r"reduce\(\) sent 'broadcast', expected all_reduce or"),
    "no generator": (lambda flat: Reduced(flat, flat), "TypeError: 'Reduced' object is not an iterator"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_codec_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    reducing, said = CASES[case]
    monkeypatch.setattr(Foreign, "reducing", staticmethod(reducing), raising=False)
    bucket = Outgoing(torch.ones(6), torch.zeros(6), [(6,)], [0])
    with pytest.raises(PluginError, match=f"the codec foreign of {__name__} cannot be used: .*{said}"):
        send(Foreign(dtype="bfloat16"), bucket, lambda sent: sent.operand, {}, 0, 1)
