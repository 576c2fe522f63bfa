"""The end of a recording that the job's own end overtakes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "fail_while_writing.py"

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]


def test_a_job_that_fails_waits_for_the_thread_that_writes(tmp_path: Path) -> None:
    job = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)], check=False, capture_output=True, text=True, timeout=50
    )
    assert job.returncode == 1
    assert "the job failed" in job.stderr
    assert job.stdout == "written\n"
