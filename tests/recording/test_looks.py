"""Looks at gradients and values are noted while they are watched, and parameters are ordinary ones before and after."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from headway.recording.grad_access import AccessWatch
from headway.strategies.decoupled import deferred
from headway.strategies.live.reads import install

Told = list[tuple[frozenset[str], int, int]]


@pytest.fixture
def net() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    net(torch.ones(1, 2)).sum().backward()
    return net


@pytest.fixture
def told() -> Told:
    return []


@pytest.fixture
def watch(net: nn.Module, told: Told) -> Iterator[AccessWatch]:
    watch = AccessWatch(lambda *looks: told.append(looks))
    watch.open(dict(net.named_parameters()))
    yield watch
    watch.discard()


def all_ordinary(net: nn.Module) -> bool:
    return all(type(p) is nn.Parameter for p in net.parameters())


def names(told: Told) -> list[list[str]]:
    assert all(first_ns <= last_ns for _, first_ns, last_ns in told)
    return [sorted(names) for names, _, _ in told]


def test_looks_are_told_of_together_and_apart_from_those_before_a_flush(
    net: nn.Module, told: Told, watch: AccessWatch
) -> None:
    first, second = net[0].weight, net[1].bias  # type: ignore[index]
    assert [first.grad is first.grad, second.grad.shape] == [True, (1,)]
    watch.flush()
    first.grad = first.grad * 2
    del second.grad
    assert second.grad is None, "nothing to look at"
    assert isinstance(first, nn.Parameter)
    assert repr(first).startswith("Parameter containing")
    watch.close()
    assert first.grad is not None
    assert names(told) == [["0.weight", "1.bias"], ["0.weight"]]
    assert all_ordinary(net)


def test_copies_are_ordinary_and_no_looks(net: nn.Module, told: Told, watch: AccessWatch) -> None:
    pickled = pickle.loads(pickle.dumps(net))
    saved = io.BytesIO()
    torch.save(net.state_dict(), saved)
    assert all_ordinary(pickled)
    assert all_ordinary(copy.deepcopy(net))
    assert not all_ordinary(net)
    watch.close()
    assert told == []


@pytest.mark.parametrize("of", ["optimizer", "module"])
def test_clearing_gradients_ends_it(net: nn.Module, told: Told, watch: AccessWatch, of: str) -> None:
    cleared = net if of == "module" else torch.optim.SGD(net.parameters(), lr=0.1)
    cleared.zero_grad(set_to_none=False)
    assert all_ordinary(net)
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters())
    assert told == []


def test_looks_of_known_functions_and_of_other_threads_do_not_count(
    net: nn.Module, told: Told, watch: AccessWatch
) -> None:
    install()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    other = threading.Thread(target=lambda: [p.grad for p in net.parameters()])
    other.start()
    other.join()
    watch.close()
    assert told == []


def test_parameters_of_a_runtime_and_of_other_classes_are_left_alone(net: nn.Module, told: Told) -> None:
    class Entry:
        def before_gradient_read(self) -> None: ...

    class Own(nn.Parameter): ...

    watched, other, entry = net[0].weight, net[0].bias, Entry()  # type: ignore[index]
    deferred.register(watched, entry)  # type: ignore[arg-type]
    other.__class__ = Own
    watch = AccessWatch(lambda *looks: told.append(looks))
    watch.open(dict(net.named_parameters()))
    assert type(watched) is nn.Parameter
    assert type(other) is Own
    deferred.unregister(watched)
    watch.discard()
    assert type(other) is Own


def test_nothing_is_watched_where_code_was_compiled(
    net: nn.Module, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.torch_private.has_compiled", lambda: True)
    AccessWatch(lambda *looks: told.append(looks)).open(dict(net.named_parameters()))
    assert all_ordinary(net)


@pytest.fixture
def values(net: nn.Module, told: Told) -> Iterator[AccessWatch]:
    watch = AccessWatch(lambda *looks: told.append(looks), values=True)
    watch.open(dict(net.named_parameters()))
    yield watch
    watch.discard()


VALUE_LOOKS: dict[str, Callable[[nn.Module], object]] = {
    "computes": lambda net: net[0].weight * 2,  # type: ignore[index]
    "detaches": lambda net: net[0].weight.detach(),  # type: ignore[index]
    "past autograd": lambda net: net[0].weight.data,  # type: ignore[index]
    "many at once": lambda net: torch._foreach_norm([net[0].weight]),  # type: ignore[index]
    "copies": lambda net: copy.deepcopy(net[0].weight),  # type: ignore[index]
    "pickles": lambda net: pickle.loads(pickle.dumps(net[0].weight)),  # type: ignore[index]
    "prints": lambda net: repr(net[0].weight),  # type: ignore[index]
    "makes a parameter of it": lambda net: nn.Parameter(net[0].weight),  # type: ignore[index]
    "makes one like it": lambda net: type(net[0].weight)(net[0].weight),  # type: ignore[index]
    "embeds it": lambda net: nn.Embedding.from_pretrained(net[0].weight).weight,  # type: ignore[index]
    "writes": lambda net: nn.init.ones_(net[0].weight) is None,  # type: ignore[index]
}


@pytest.mark.parametrize("how", VALUE_LOOKS)
def test_looks_at_values_are_told_of(net: nn.Module, told: Told, values: AccessWatch, how: str) -> None:
    result = VALUE_LOOKS[how](net)
    assert "Noticed" not in str(result)
    assert not isinstance(result, torch.Tensor) or type(result) in (torch.Tensor, nn.Parameter)
    assert not isinstance(result, nn.Parameter) or torch.equal(result, net[0].weight)  # type: ignore[index]
    values.close()
    assert names(told) == [["0.weight"]]
    assert all_ordinary(net)


def test_what_is_about_no_value_is_no_look_at_one(net: nn.Module, told: Told, values: AccessWatch) -> None:
    torch.optim.SGD(net.parameters(), lr=0.1).zero_grad(set_to_none=False)
    net.zero_grad()
    assert [(p.shape, p.numel(), p.requires_grad, p.grad, p.dtype) for p in net.parameters()]
    assert len(set(net.parameters())) == 4
    values.close()
    assert told == []
