"""The ways of a gradient and of a micro-batch are short: their calls and files are counted."""

from __future__ import annotations

import pytest
from tests import workers

MOST_CALLS, MOST_FILES = 6, 4
MOST_CALLS_A_PARAMETER = 21.5
LOOP = ["collectives/executor.py", "execute"]  # compiled, so that no frame of its own is seen

MOST_FILES_OF_A_MICRO_BATCH = 6
HELPERS = {"torch_private/tracing.py"}  # torch's own functions over nested containers

pytestmark = pytest.mark.processes


def test_a_gradient_gets_from_its_hook_to_its_collective_in_few_calls() -> None:
    for result in workers.run(2, "tests.behaviour.call_chain_cases:watch", timeout_s=110):
        for mode, seen in result.items():
            assert seen["compiled"]
            ways = [[*begun, *ended, LOOP] for begun in seen["to_queue"] for ended in seen["to_collective"]]
            assert len(seen["to_queue"]) >= 3, mode
            for way in ways:
                assert way[0][1].endswith("_take_gradient"), way
                assert len(way) <= MOST_CALLS, way
                assert len({file for file, _ in way}) <= MOST_FILES, way
            assert seen["calls_a_parameter"] <= MOST_CALLS_A_PARAMETER, mode


def test_a_micro_batch_goes_through_few_files() -> None:
    for files in workers.run(2, "tests.behaviour.call_chain_cases:watch_micro_batches", timeout_s=110):
        assert "strategies/pipeline/runtime.py" in files
        assert len(set(files) - HELPERS) <= MOST_FILES_OF_A_MICRO_BATCH, files
