"""Collectives, and the updates between them, run on streams of their own, concurrently with computation."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

from tests import limits, workers
from tests.gpu import record_timeline
from tests.gpu.setups import needs_gpu


@needs_gpu
def test_collectives_run_beside_computation(tmp_path: Path) -> None:
    target = tmp_path / "timeline.json.gz"
    done = subprocess.run(
        [sys.executable, "-m", record_timeline.__name__, str(target)],
        cwd=workers.ROOT, capture_output=True, text=True, timeout=limits.stretched(110), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    streams = json.loads(done.stdout)["streams"]
    assert streams["compute"]
    assert not set(streams["compute"]) & set(streams[record_timeline.SPIN])
    assert not set(streams["compute"]) & set(streams["update"])
    assert json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]


def test_what_a_trace_says() -> None:
    def kernel(name: str, stream: int, start: float, duration: float) -> dict[str, object]:
        return {"cat": "kernel", "name": name, "ts": start, "dur": duration, "args": {"stream": stream}}

    trace = {
        "traceEvents": [
            {"cat": "cpu_op", "name": "aten::mm"},
            kernel("ampere_sgemm_128", 7, 0, 10),
            kernel("sm90_xmma_gemm", 7, 12, 4),
            kernel("spin_kernel(long)", 20, 5, 10),
            kernel("multi_tensor_apply_kernel", 20, 15, 1),
        ]
    }
    found = record_timeline.summary(trace)
    assert found["streams"] == {"compute": [7], "spin": [20], "update": [20]}
    assert found["hidden_share"] == (5 + 3) / 10
