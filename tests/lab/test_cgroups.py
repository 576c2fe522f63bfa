from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headway.lab import slow
from headway.lab.slow import NotPermittedError, Parent, Quotas, find_parent, quota_us

Proc = Callable[..., Path]


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    """A /proc/self with the given mounts and memberships; ``{top}`` is a folder for hierarchies."""

    def make(mounts: str, groups: str) -> Path:
        folder = tmp_path / "proc"
        folder.mkdir()
        (folder / "mountinfo").write_text("22 1 0:1 / / rw - ext4 /dev/a rw\n" + mounts.format(top=tmp_path))
        (folder / "cgroup").write_text(groups)
        return folder

    return make


def group(path: Path, controllers: str = "") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "cgroup.procs").touch()
    (path / "cgroup.subtree_control").write_text(controllers)
    return path


VERSION_2 = "31 23 0:27 / {top}/2 rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
VERSION_1 = (
    "32 23 0:28 / {top}/set rw - cgroup cgroup rw,cpuset\n"
    "33 23 0:29 /docker {top}/1 rw - cgroup cgroup rw,cpu,cpuacct\n"
)


def test_version_2_takes_the_nearest_group_that_hands_the_controller_down(tmp_path: Path, proc: Proc) -> None:
    group(tmp_path / "2", "cpu io")
    near = group(tmp_path / "2" / "user" / "app", "cpu memory")
    own = group(near / "shell")
    found = find_parent(proc(VERSION_2, f"0::/{own.relative_to(tmp_path / '2')}\n"))
    assert found == Parent(near, 2, is_own=False)


def test_version_1_serves_where_version_2_has_no_cpu_controller(tmp_path: Path, proc: Proc) -> None:
    group(tmp_path / "2", "memory")
    own = group(tmp_path / "1" / "abc")
    groups = "4:cpuset:/\n3:cpu,cpuacct:/docker/abc\n0::/\n"
    assert find_parent(proc(VERSION_2 + VERSION_1, groups)) == Parent(own, 1, is_own=True)


@pytest.mark.parametrize(
    ("mounts", "groups", "why"),
    [
        ("", "0::/\n", "no control groups"),
        (VERSION_2, "0::/\n", "does not delegate the cpu controller"),
        (VERSION_2, "0::/../outside\n", "no control groups"),
        (VERSION_1, "3:cpu,cpuacct:/elsewhere\n", "no control groups"),
        (VERSION_1, "3:cpu,cpuacct:/docker/gone\n", "cannot be written"),
    ],
)
def test_why_quotas_are_not_permitted(proc: Proc, mounts: str, groups: str, why: str) -> None:
    with pytest.raises(NotPermittedError, match=why):
        find_parent(proc(mounts, groups))


@pytest.mark.parametrize("share", [1e-3, 0.02, 0.05, 0.3, 0.5, 0.999])
def test_a_quota_is_the_share_of_its_period_and_within_the_kernels_bounds(share: float) -> None:
    quota, period = quota_us(share)
    assert quota / period == pytest.approx(share, rel=0.01)
    assert 1_000 <= quota <= period <= 1_000_000
    assert period == slow.PERIOD_US or share < 0.05


def test_version_2_is_written_as_the_kernel_reads_it(tmp_path: Path) -> None:
    quotas = Quotas.within(Parent(tmp_path, 2, is_own=True), "lab-7")
    quotas.make(3, [0.5])
    assert quotas.path == tmp_path / "headway-lab-7"
    assert (quotas.path / "cgroup.subtree_control").read_text() == "+cpu"
    assert (quotas.path / "cpu.weight").read_text() == "300"
    assert (quotas.path / "rank0" / "cpu.max").read_text() == "max 20000"
    quotas.apply(2, 0.5)
    assert (quotas.path / "rank2" / "cpu.max").read_text() == "10000 20000"
    assert quotas.entrance(1) == quotas.path / "rank1" / "cgroup.procs"


def test_version_1_is_written_as_the_kernel_reads_it(tmp_path: Path) -> None:
    quotas = Quotas.within(Parent(tmp_path, 1, is_own=True), "lab-7")
    quotas.make(2, [])
    assert (quotas.path / "cpu.shares").read_text() == "2048"
    rank = quotas.path / "rank1"
    quotas.apply(1, 0.01)
    assert [(rank / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")] == ["1000", "100000"]
    quotas.apply(1, 1.0)
    assert (rank / "cpu.cfs_quota_us").read_text() == "-1"


def test_groups_that_cannot_be_made_are_not_permitted(tmp_path: Path) -> None:
    with pytest.raises(NotPermittedError, match=r"headway-lab-7: No such file"):
        Quotas(tmp_path / "gone" / "headway-lab-7", 2).make(1, [])


def test_a_group_in_use_stays_and_its_processes_are_known(tmp_path: Path) -> None:
    path = tmp_path / "headway-lab-7"
    (group(path / "rank0") / "cgroup.procs").write_text("12\n0\n34\n")
    assert slow.members(path) == {12, 34}
    assert not slow.remove(path, patience_s=0.0)
    assert slow.members(tmp_path / "gone") == set()
    assert slow.remove(tmp_path / "gone")
