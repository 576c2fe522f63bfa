"""What the lab does without privilege, and what it refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile

import pytest
from tests import limits
from tests.behaviour.lab.jobs import cli, permitted
from tests.commands import run as run_command

from headway.errors import LabError, LaunchError
from headway.lab.launch import run
from headway.lab.processes import members
from headway.lab.spec import LabSpec

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


NOBODY = 65534


def run_as_nobody(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python ``code`` as a user without privilege, or skip where that cannot be done."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    python = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin:/usr/local/bin")
    if python is None:
        pytest.skip("no interpreter that everybody may run")
    with tempfile.TemporaryDirectory() as home:
        os.chown(home, NOBODY, NOBODY)
        env = {"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": home, "PYTHONDONTWRITEBYTECODE": "1"}
        env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)

        def attempt(source: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [python, "-P", "-c", source],
                env=env, cwd="/", user=NOBODY, group=NOBODY, extra_groups=(), check=False,
                capture_output=True, text=True, timeout=limits.stretched(40),
            )  # fmt: skip

        if attempt("import headway.lab.launch, pyroute2").returncode:
            pytest.skip("the packages cannot be read by everybody")
        return attempt(code)


RUN = "import sys; from headway.lab.launch import run; from headway.lab.spec import LabSpec; "


@pytest.mark.namespaces
def test_a_user_without_privilege_gets_namespaces() -> None:
    permitted("user")
    command = ["sh", "-c", "id -u; grep CapEff /proc/self/status; exit 9"]
    result = run_as_nobody(RUN + f"sys.exit(run(LabSpec(hosts=2, rate='80mbit'), {command}))")
    assert result.returncode == 9, result.stderr
    assert "network namespaces (unprivileged)" in result.stderr
    assert f"[rank 0] {NOBODY}\n" in result.stdout
    assert "[rank 1] CapEff:\t0000000000000000\n" in result.stdout


def test_a_mode_that_is_not_permitted_is_refused() -> None:
    result = run_as_nobody(RUN + "run(LabSpec(hosts=1), ['true'], mode='root')")
    assert "LabError: the lab mode root is not permitted here" in result.stderr


def test_a_quota_that_is_not_permitted_is_refused() -> None:
    arguments = ["lab", "run", "--hosts", "1", "--slow", "0=0.5", "--slow-by", "quota", "--", "true"]
    result = run_as_nobody(
        f"import sys; sys.argv[1:] = {arguments}; from headway.cli.main import main; main()"
    )
    assert result.returncode == 2
    assert "slowing workers by CPU quota is not permitted here" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def run_with_limit(limit: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``headway lab run`` where the kernel grants no namespace of one kind."""
    permitted("user")
    if shutil.which("unshare") is None:
        pytest.skip("no unshare command")
    code = "from headway.cli.main import main; main()"
    script = f'echo 0 > /proc/sys/user/{limit} && exec "$@"'
    command = ["unshare", "-Ur", "sh", "-c", script, "sh", sys.executable, "-P", "-c", code, "lab", "run"]
    return run_command([*command, *arguments], 40)


@pytest.mark.namespaces
def test_without_network_namespaces_auto_falls_back_to_loopback() -> None:
    arguments = ("--hosts", "2", "--rate", "80mbit", "--", "sh", "-c", "echo $GLOO_SOCKET_IFNAME")
    result = run_with_limit("max_net_namespaces", *arguments)
    assert sorted(result.stdout.splitlines()) == ["[rank 0] lo", "[rank 1] lo"]
    assert "links are unshaped" in result.stderr
    forced = run_with_limit("max_net_namespaces", "--mode", "user", *arguments)
    assert forced.returncode == 2
    assert "not permitted" in forced.stderr


@pytest.mark.namespaces
def test_without_process_namespaces_links_are_shaped_and_nothing_stays() -> None:
    script = "(setsid sleep 300 >/dev/null 2>&1 &); echo $GLOO_SOCKET_IFNAME $HEADWAY_LAB_ID"
    result = run_with_limit(
        "max_pid_namespaces", "--hosts", "1", "--rate", "80mbit", "--", "sh", "-c", script
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("[rank 0] eth0 lab-")
    assert members(result.stdout.split()[-1]) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("run", "--hosts", "2", "--rate", "0mbit", "--", "true"), "rate"),
        (("run", "--hosts", "2", "--rate", "10 gigabit", "--", "true"), "got '10 gigabit'"),
        (("run", "--hosts", "2", "--slow", "5=0.5", "--", "true"), "no such rank"),
        (("run", "--hosts", "2", "--slow", "1=1.5", "--", "true"), "less than or equal to 1"),
        (("run", "--hosts", "2", "--at", "1s kill 9", "--", "true"), "no such rank"),
        (("run", "--hosts", "2", "--at", "1s link host9 1mbit", "--", "true"), "no such host"),
        (("run", "--hosts", "2", "--at", "whenever", "--", "true"), "event cannot be read"),
        (("run", "--hosts", "2", "--grace", "long", "--", "true"), "grace cannot be read"),
        (("run", "--hosts", "2", "--", "no-such-command"), "command not found"),
        (("run", "--hosts", "2"), "no command"),
        (("run", "--", "true"), "no lab is specified"),
        (("run", "none.yaml", "--", "true"), "not found"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments: tuple[str, ...], says: str) -> None:
    result = cli(*arguments)
    assert result.returncode == 2
    assert says in result.stderr
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1


def test_a_missing_netlink_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.lab.launch.find_spec", lambda _: None)
    with pytest.raises(LabError, match=r"pip install 'pyroute2"):
        run(LabSpec(hosts=1), ["true"])
    with pytest.raises(LaunchError):
        run(LabSpec(hosts=1), [])
