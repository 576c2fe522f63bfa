"""What convolutions hold inside, against what a process grows by while they run."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from tests import limits

from headway import torch_private
from headway.memory.pass_watch import inner_bytes

CONVOLUTION, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
OPTIONS = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)

GROWTH = """
import sys, threading, time
import torch
torch.set_num_threads(1)

def anonymous_bytes():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

def look(seen, done):
    while not done.is_set():
        seen.append(anonymous_bytes())
        time.sleep(0.0002)

x, w = torch.randn(16, 64, 64, 64), torch.randn(64, 64, 3, 3)
options = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
y = torch.ops.aten.convolution(x, w, None, *options)
if sys.argv[1] == "forward":
    run = lambda: torch.ops.aten.convolution(x, w, None, *options)
else:
    run = lambda: torch.ops.aten.convolution_backward(y, x, w, None, *options, [True, True, False])
run()
before, seen, done = anonymous_bytes(), [], threading.Event()
looking = threading.Thread(target=look, args=(seen, done))
looking.start()
for _ in range(3):
    out = run()
    del out
done.set()
looking.join()
print(max(seen) - before)
"""


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    given, weight = torch.zeros(16, 64, 64, 64), torch.zeros(64, 64, 3, 3)
    return given, weight, torch.zeros(16, 64, 64, 64)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build has no oneDNN")
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_process_grows_by_as_much(way: str) -> None:
    """Memory that is freed is returned at once, so that growth is what is held."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, way],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=limits.stretched(120),
    )
    given, weight, put_out = tensors()
    if way == "forward":
        inner, returned = inner_bytes(CONVOLUTION, (given, weight, *OPTIONS), put_out), put_out.nbytes
    else:
        inner = inner_bytes(BACKWARD, (put_out, given, weight, *OPTIONS), None)
        returned = given.nbytes + weight.nbytes
    assert inner + returned == pytest.approx(int(done.stdout), rel=0.15)


@pytest.mark.parametrize(
    ("batch", "channels", "kernel", "options", "counts"),
    [
        (2, 64, 1, {}, False),  # one element, one thread, few samples
        (16, 64, 1, {}, True),
        (2, 64, 1, {"stride": [2, 2]}, True),
        (2, 64, 3, {}, True),
        (1, 4, 3, {}, False),  # a small sample
        (1, 4, 5, {}, True),
        (1, 64, 3, {}, True),
        (2, 64, 3, {"transposed": True}, False),
    ],
)
def test_pytorch_chooses_who_convolves(
    batch: int, channels: int, kernel: int, options: dict[str, Any], counts: bool
) -> None:
    given, weight = torch.zeros(batch, channels, 32, 32), torch.zeros(channels, channels, kernel, kernel)
    named = {
        "stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "transposed": False, "output_padding": [0, 0],
        "groups": 1,
    } | options  # fmt: skip
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = inner_bytes(CONVOLUTION, (given, weight, None, *named.values()), given)
    finally:
        torch.set_num_threads(threads)
    assert (found > 0) == counts


def test_only_what_onednn_convolves_on_this_machine_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    given, weight, put_out = tensors()
    each = given.nbytes
    assert inner_bytes(CONVOLUTION, (given, weight, *OPTIONS), put_out) == each
    assert inner_bytes(BACKWARD, (put_out, given, weight, *OPTIONS), None) == 2 * each
    assert inner_bytes(torch.ops.aten.add.Tensor, (given, given), put_out) == 0
    last = given.contiguous(memory_format=torch.channels_last)
    assert inner_bytes(CONVOLUTION, (last, weight, *OPTIONS), last) == 0
    double = given.double()
    assert inner_bytes(CONVOLUTION, (double, weight.double(), *OPTIONS), double) == 0
    with torch_private.fake_tensors():
        fake = tensors()
        assert inner_bytes(CONVOLUTION, (*fake[:2], *OPTIONS), fake[2]) == 0
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert inner_bytes(CONVOLUTION, (given, weight, *OPTIONS), put_out) == 0
