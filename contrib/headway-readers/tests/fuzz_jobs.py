"""The jobs whose fixtures are harmed, by the name of the reader and what is particular."""

from __future__ import annotations

from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"
JOBS = {
    "xplane of jax": [f"{FIXTURES}/jax/pair?.xplane.pb"],
    "xplane of jax, unmarked": [f"{FIXTURES}/jax/bare.xplane.pb"],
    "xplane of tensorflow": [f"{FIXTURES}/tensorflow/fit?.xplane.pb"],
    "xplane of tensorflow, loop": [f"{FIXTURES}/tensorflow/loop?.xplane.pb"],
    "jax": [f"{FIXTURES}/jax/pair?.trace.json.gz"],
    "jax for perfetto": [f"{FIXTURES}/jax/single.perfetto_trace.json.gz"],
    "jax of tensorflow": [f"{FIXTURES}/tensorflow/loop0.trace.json.gz"],
    "mxnet": [f"{FIXTURES}/mxnet/module/*.json"],
    "mxnet with two servers": [f"{FIXTURES}/mxnet/two_servers/*.json"],
    "mxnet, killed": [f"{FIXTURES}/mxnet/killed/*.json"],
    "mxnet on horovod": [f"{FIXTURES}/mxnet/horovod/*.json"],
    "horovod": [f"{FIXTURES}/horovod/arrivals.json"],
    "horovod, unmarked": [f"{FIXTURES}/horovod/unmarked.json"],
}
