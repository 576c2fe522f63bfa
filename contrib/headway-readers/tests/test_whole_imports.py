"""Imports as a whole: recordings of other frameworks become traces that can be diagnosed, drawn and exported."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.interop.readers.imported_jobs import ImportedJob, check_job, copied

from headway.errors import TraceError
from headway.ext.testing import check_reader
from headway.interop.readers.formats import readers
from headway.interop.readers.importing import import_trace

FIXTURES = Path(__file__).parent / "fixtures"
JOBS = {
    "tensorflow": ImportedJob(["tensorflow/fit*"], "tensorflow", 2, 3, {"xplane": 2}),
    "tensorflow's loop": ImportedJob(["tensorflow/loop?.xplane.pb"], "tensorflow", 2, 3, {"xplane": 2}),
    "jax": ImportedJob(["jax/pair?.xplane.pb"], "jax", 4, 3, {"xplane": 2}),
    "jax as json": ImportedJob(["jax/pair?.trace.json.gz"], "jax", 4, 3, {"jax": 2}),
    "jax in both forms": ImportedJob(["jax/pair*"], "jax", 4, 3, {"xplane": 2}),
    "jax for perfetto": ImportedJob(["jax/single.perfetto*"], "jax", 4, 3, {"jax": 1}),
    "mxnet": ImportedJob(["mxnet/module/*"], "mxnet", 2, 2, {"mxnet": 3}, has_servers=True),
    "mxnet gluon": ImportedJob(["mxnet/gluon/*"], "mxnet", 2, 3, {"mxnet": 3}, has_servers=True),
    "mxnet with two servers": ImportedJob(["mxnet/two_servers/*"], "mxnet", 2, 1, {"mxnet": 4}, has_servers=True),
    "mxnet killed": ImportedJob(["mxnet/killed/*"], "mxnet", 2, 1, {"mxnet": 2}, has_servers=True),
    "mxnet on horovod": ImportedJob(["mxnet/horovod/*"], "mxnet", 2, 3, {"mxnet": 2}),
    "horovod": ImportedJob(["horovod/arrivals.json"], "horovod", 3, 5, {"horovod": 1}),
    "horovod unmarked": ImportedJob(["horovod/unmarked.json"], "horovod", 3, 5, {"horovod": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_from_documents_to_all_that_a_trace_is_for(tmp_path: Path, name: str) -> None:
    check_job(JOBS[name], FIXTURES, tmp_path)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("xplane", "jax/single.xplane.pb"),
        ("mxnet", "mxnet/killed/worker0.json"),
        ("horovod", "horovod/arrivals.json"),
    ],
)
def test_they_pass_the_check_of_readers(name: str, file: str) -> None:
    check_reader(readers()[name], file, (FIXTURES / file).read_bytes(), damages=20)


def test_several_recordings_of_one_rank_are_refused(tmp_path: Path) -> None:
    source = copied(FIXTURES, tmp_path, ["horovod/*.json"])
    with pytest.raises(TraceError, match="3 recordings claim rank 0"):
        import_trace(source, tmp_path / "out")


@pytest.mark.parametrize("chosen", list(readers()))
@pytest.mark.parametrize("lenient", [False, True])
def test_any_file_forced_into_any_format(tmp_path: Path, chosen: str, lenient: bool) -> None:
    files = ("jax/single.xplane.pb", "mxnet/module/worker0.json", "horovod/arrivals.json", "mxnet/make.py")
    for number, file in enumerate(files):
        try:
            import_trace(FIXTURES / file, tmp_path / str(number), format_name=chosen, lenient=lenient)
        except TraceError as failure:
            assert "\n" not in str(failure)  # noqa: PT017 - some of them are of that format
            assert "it raised" not in str(failure)  # noqa: PT017
        assert not any(path.name.startswith(".") for path in tmp_path.iterdir())
