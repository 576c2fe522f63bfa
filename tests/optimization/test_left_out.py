"""Plug-ins of other packages that fail in a search: left out with one warning, or refused where they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

import pytest
from tests.replayer.test_replayer import as_bucketed, cluster_of, job
from tests.synthetic import synthetic_trace

from headway.compression import registry as codec_registry
from headway.compression.cast import Cast
from headway.compression.codec import Exchange
from headway.errors import PluginError
from headway.job import Job
from headway.optimization.search import search
from headway.passes.base import Pass
from headway.passes.registry import passes
from headway.plugins import WARNED_VARIABLE
from headway.replayer.replayer import Replayer
from headway.strategies import registry
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.plugin import Proposal

_Ddp: Any = type(registry.plugin_named("ddp"))


class Foreign(DistributedDataParallelStrategy):
    name: ClassVar[str] = "foreign"


class Undecided(Foreign):
    def decide(self, job: Job) -> Any:
        return None


class _Plugin(_Ddp):  # type: ignore[misc]
    policy = Foreign

    def propose(self, job: Job) -> Any:
        return Proposal((self.policy(bucket_cap_mb=2),))


class _Unreplayed(_Plugin):
    def reactions(self, *_: Any) -> Any:
        raise ValueError("planted")


class _Unmeasured(_Plugin):
    def footprint(self, *_: Any) -> Any:
        return 1 / 0


class _Listed(_Plugin):
    def propose(self, job: Job) -> Any:
        return [Foreign()]


class _Undecided(_Plugin):
    policy = Undecided


class _Pass(Pass):
    name: ClassVar[str] = "steep"

    @classmethod
    def proposed(cls, job: Job) -> tuple[Self, ...]:
        return (cls(),)

    def rewrite(self, job: Job) -> Any:
        raise KeyError("planted")

    def apply(self, module: Any, optimizer: Any) -> Any:
        raise NotImplementedError

    def describe(self) -> str:
        return "steep"


class _Lost(_Pass):
    def rewrite(self, job: Job) -> Any:
        return None


class _Codec(Cast):
    name: ClassVar[str] = "worst"
    codec: Literal["worst"] = "worst"  # type: ignore[assignment]

    @classmethod
    def proposed(cls) -> tuple[Self, ...]:
        return (cls(dtype="bfloat16"),)

    def exchanges(self, *_: Any) -> tuple[Exchange, ...]:
        raise KeyError("planted")


class _LaterCodec(_Codec):
    def exchanges(self, shapes: Any, *_: Any) -> tuple[Exchange, ...]:
        if shapes == ((8, 8),):
            return ()
        raise KeyError("planted")


@pytest.fixture(scope="module")
def replayer() -> Replayer:
    one = job(forward_ms=20, backward_ms=40, gbps=1.0)
    return Replayer(as_bucketed(synthetic_trace(one)), cluster_of(one))


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """DDP is the only strategy, so that searches are short; nothing was warned of."""
    for name in registry.names():
        if name != "ddp":
            monkeypatch.delitem(registry.plugins(), name)
    monkeypatch.setenv(WARNED_VARIABLE, "")
    codec_registry.proposed.cache_clear()
    yield
    codec_registry.proposed.cache_clear()


@pytest.mark.parametrize(
    ("plugin", "why"),
    [
        (_Unreplayed, "ValueError: planted"),
        (_Unmeasured, "ZeroDivisionError: division by zero"),
        (_Listed, "TypeError: propose() returned list, expected Proposal"),
        (_Undecided, "TypeError: decide() returned NoneType, expected a schedule"),
    ],
)
def test_a_strategy_that_fails(
    replayer: Replayer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    plugin: type[Any],
    why: str,
) -> None:
    monkeypatch.setitem(registry.plugins(), "foreign", plugin())
    assert {each.strategy.name for each in search(replayer).candidates} == {"ddp"}
    warning = capsys.readouterr().err
    assert f"the strategy foreign of {__name__} is left out: it raised {why}" in warning
    assert warning.count("\n") == 1
    with pytest.raises(PluginError, match=f"the strategy foreign of {__name__} cannot be used: it raised"):
        search(replayer, needed="foreign")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("kind", "why"), [(_Pass, "KeyError: 'planted'"), (_Lost, "TypeError: rewrite() returned NoneType")]
)
def test_a_pass_that_cannot_rewrite(
    replayer: Replayer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: type[Pass],
    why: str,
) -> None:
    monkeypatch.setitem(passes(), "steep", kind)
    assert not any(each.name == "steep" for one in search(replayer).candidates for each in one.passes)
    warning = capsys.readouterr().err
    assert f"the pass steep of {__name__} is left out: it raised {why}" in warning
    assert warning.count("\n") == 1


@pytest.mark.parametrize("kind", [_Codec, _LaterCodec])
def test_a_codec_that_says_no_exchanges(
    replayer: Replayer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: type[_Codec],
) -> None:
    for name in list(codec_registry.codecs()):
        monkeypatch.delitem(codec_registry.codecs(), name)
    monkeypatch.setitem(codec_registry.codecs(), "worst", kind)
    assert search(replayer, allow=("precision",)).candidates
    warning = capsys.readouterr().err
    assert f"the codec worst of {__name__} is left out: it raised KeyError: 'planted'" in warning
    assert warning.count("\n") == 1
