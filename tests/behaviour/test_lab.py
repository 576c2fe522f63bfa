"""The lab with real processes, and real namespaces where they are permitted."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from tests import limits
from tests.commands import communicate
from tests.commands import run as run_command

from headway.errors import HeadwayError, LabError, LaunchError
from headway.lab import cgroups, state
from headway.lab.flags import override, parse_event
from headway.lab.launch import Mode, best_mode, run
from headway.lab.processes import members
from headway.lab.spec import LabSpec

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

NOBODY = 65534


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


class Job:
    """What a run printed, noticed and returned."""

    def __init__(
        self,
        spec: LabSpec,
        command: Sequence[str],
        *,
        mode: Mode = "loopback",
        grace_s: float = 2.0,
        timeout_s: float | None = 30.0,
    ) -> None:
        self.lines: list[tuple[int, str, str]] = []
        self.notices: list[str] = []
        self.status = run(
            spec,
            command,
            mode=mode,
            grace_s=grace_s,
            timeout_s=None if timeout_s is None else limits.stretched(timeout_s),
            on_line=lambda *line: self.lines.append(line),
            on_notice=self.notices.append,
        )

    def text_of(self, rank: int, stream: str = "stdout") -> list[str]:
        return [text for number, name, text in self.lines if (number, name) == (rank, stream)]


@functools.cache
def refusal(mode: Mode) -> str | None:
    """Why ``mode`` is not permitted here, or None."""
    try:
        run(LabSpec(hosts=1), ["true"], mode=mode, on_notice=lambda _: None)
    except HeadwayError as failure:
        return str(failure)
    return None


@pytest.fixture(params=["root", "user"])
def namespaced(request: pytest.FixtureRequest) -> Mode:
    return permitted(request.param)


def permitted(mode: Mode) -> Mode:
    if why := refusal(mode):
        pytest.skip(why)
    return mode


@pytest.fixture(params=["root", "user", "loopback"])
def any_mode(request: pytest.FixtureRequest) -> Mode:
    return permitted(request.param)


@pytest.fixture
def bulk(tmp_path: Path) -> Path:
    script = tmp_path / "bulk.py"
    script.write_text(BULK)
    return script


BULK = """
import os, socket, sys, time
rank, sender, total = int(os.environ["RANK"]), int(sys.argv[1]), int(sys.argv[2])
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    peer, _ = socket.create_server(place).accept()
while rank == 1:
    try:
        peer = socket.create_connection(place)
        break
    except ConnectionRefusedError:
        time.sleep(0.02)
if rank == sender:
    peer.sendall(bytes(total))
    peer.recv(1)
else:
    got, began, buffer = 0, time.monotonic(), bytearray(1 << 18)
    while got < total:
        got += peer.recv_into(buffer)
    print("mbit/s", got * 8e-6 / (time.monotonic() - began))
    peer.sendall(b"x")
"""


def goodput_mbps(job: Job, receiver: int) -> float:
    assert job.status == 0, job.lines
    (line,) = job.text_of(receiver)
    return float(line.removeprefix("mbit/s "))


def start_cli(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start ``headway lab`` as users do. Interrupts are ours to send, not the terminal's.

    And they are not ignored, as they are where the tests themselves were started in the background.
    """
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    run = f"{heard}; from headway.cli.main import main; main()"
    command = [sys.executable, "-P", "-c", run, "lab", *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    with start_cli(*arguments) as process:
        out, err = communicate(process, 40)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)


@pytest.mark.namespaces
def test_ranks_see_torchruns_environment(any_mode: Mode) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE HEADWAY_HOST"
    script = f'for name in {names}; do eval "printf %s, \\$$name"; done'
    spec = LabSpec(hosts=2, workers_per_host=2)
    job = Job(spec, ["sh", "-c", script], mode=any_mode)
    assert job.status == 0
    assert [job.text_of(rank) for rank in range(4)] == [
        ["0,0,4,2,0,2,host0,"],
        ["1,1,4,2,0,2,host0,"],
        ["2,0,4,2,1,2,host1,"],
        ["3,1,4,2,1,2,host1,"],
    ]
    assert state.labs() == []


def test_the_best_mode_is_the_one_auto_takes() -> None:
    job = Job(LabSpec(hosts=1), ["sh", "-c", "echo $HEADWAY_LAB_MODE"], mode="auto")
    assert job.text_of(0) == [best_mode()]


def test_loopback_says_that_links_are_unshaped() -> None:
    job = Job(LabSpec(hosts=2, rate="80mbit"), ["true"])
    assert any("links are unshaped" in notice for notice in job.notices)


def test_the_command_line_prefixes_lines_and_keeps_the_streams_apart() -> None:
    result = cli("run", "--hosts", "1", "--mode", "loopback", "--", "sh", "-c", "echo out; echo err >&2")
    assert result.returncode == 0
    assert result.stdout == "[rank 0] out\n"
    assert "[rank 0] err\n" in result.stderr
    assert "headway lab: 1 hosts, 1 workers, plain loopback\n" in result.stderr
    bare = cli("run", "--hosts", "1", "--mode", "loopback", "--no-prefix", "--", "echo", "out")
    assert bare.stdout == "out\n"


def test_a_lab_file_and_flags(tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text("hosts: 3\nrate: 80mbit\npace: {0: 2.0}\n")
    script = 'echo "$WORLD_SIZE $HEADWAY_PACE_FACTOR"'
    flags = ("--hosts", "1", "--pace", "0=3", "--mode", "loopback", "--no-prefix")
    result = cli("run", str(tmp_path / "lab.yaml"), *flags, "--", "sh", "-c", script)
    assert result.stdout == "1 3\n"


def test_the_first_failure_is_the_status_and_ends_the_others() -> None:
    script = "case $RANK in 0) exit 3;; 1) trap 'exit 7' TERM; while :; do sleep 0.05; done;; esac"
    job = Job(LabSpec(hosts=3), ["sh", "-c", script], grace_s=0.3)
    assert job.status == 3
    assert any("rank 0 ended with status 3" in notice for notice in job.notices)


def test_a_rank_that_does_not_end_is_killed() -> None:
    script = "[ $RANK = 0 ] && exit 4; trap '' TERM; while :; do sleep 0.05; done"
    assert Job(LabSpec(hosts=2), ["sh", "-c", script], grace_s=0.2).status == 4


def test_time_is_up() -> None:
    job = Job(LabSpec(hosts=2), ["sleep", "50"], timeout_s=0.2)
    assert job.status == 124


@pytest.mark.namespaces
def test_a_killed_rank_gives_137(any_mode: Mode) -> None:
    spec = override(None, hosts=2, timeline=[parse_event("200ms kill 1")])
    job = Job(spec, ["sh", "-c", "[ $RANK = 0 ] || sleep 50"], mode=any_mode)
    assert job.status == 137


def test_a_slow_worker_gets_its_share_and_recovers(tmp_path: Path) -> None:
    script = tmp_path / "spin.py"
    script.write_text(
        "import time\n"
        "now = time.monotonic\n"
        "begun, last = now(), now()\n"
        "stopped = [0.0, 0.0, 0.0, 0.0]\n"
        "while last < begun + 4:\n"
        "    time.sleep(0.0005)\n"
        "    gap, last = now() - last, now()\n"
        "    stopped[min(3, int(last - begun))] += gap if gap > 0.02 else 0.0\n"
        "print(stopped[0], stopped[3])\n"
    )
    events = [parse_event("2s slow 0 1")]
    spec = override(None, hosts=1, slow={0: "0.25"}, slow_by="signals", timeline=events)
    job = Job(spec, [sys.executable, "-S", str(script)])
    assert job.status == 0
    assert any("stopped for part of every 40 ms" in notice for notice in job.notices)
    # A quarter of the first second runs, the fourth is whole but for what else the machine does.
    first_s, fourth_s = (float(number) for number in job.text_of(0)[0].split())
    assert 0.5 < first_s < 0.95
    assert fourth_s < 0.5 * first_s


def groups_left() -> list[Path]:
    """The control groups of this process's own labs, or skip where quotas are not permitted."""
    spec = LabSpec(hosts=1, slow={0: 0.5}, slow_by="quota")
    try:
        run(spec, ["true"], mode="loopback", on_notice=lambda _: None)
        return list(cgroups.find_parent().path.glob(f"headway-lab-{os.getpid()}-*"))
    except LabError as refusal:
        pytest.skip(str(refusal))


@pytest.mark.namespaces
def test_a_quota_bounds_a_worker_and_its_children(any_mode: Mode) -> None:
    """The kernel keeps to a quota whatever else the machine does: CPU time may be less, never much more."""
    assert groups_left() == []
    spin = (
        "import os, time\n"
        "child = os.fork()\n"
        "end = time.monotonic() + 1\n"
        "while time.monotonic() < end: pass\n"
        "if child: os.wait(); print(sum(os.times()[:4]))\n"
    )
    spec = override(
        None, hosts=2, slow={1: "0.25"}, slow_by="quota", timeline=[parse_event("900ms slow 0 0.5")]
    )
    job = Job(spec, [sys.executable, "-S", "-c", spin], mode=any_mode)
    assert job.status == 0
    assert float(job.text_of(1)[0]) < 0.4
    assert any("a CPU quota (cgroup v" in notice for notice in job.notices)
    assert "900ms: rank 0 gets 50% of a core" in job.notices
    assert groups_left() == []


def test_clean_empties_and_removes_the_control_group_that_a_killed_lab_left() -> None:
    """What is in the group is the lab's, also a process that has forgotten its environment."""
    assert groups_left() == []
    flags = ("--hosts", "1", "--mode", "loopback", "--slow", "0=0.5", "--slow-by", "quota")
    script = "(env -i setsid sleep 300 >/dev/null 2>&1 &); echo up; sleep 300"
    with start_cli("run", *flags, "--", "sh", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        (lab,) = state.labs()
        assert lab.record.group is not None
        assert lab.record.group.exists()
        assert state.clean() == ([], [])
        process.send_signal(signal.SIGSTOP)
        os.kill(lab.record.orchestrator.pid, signal.SIGKILL)
        process.kill()
        process.wait()
    assert lab.record.group.exists()
    assert cli("clean").returncode == 0
    assert not lab.record.group.exists()
    assert state.labs() == []


@pytest.mark.parametrize("slow_by", ["auto", "quota"])
def test_groups_that_turn_out_not_to_work(monkeypatch: pytest.MonkeyPatch, slow_by: str) -> None:
    def refuse(*_: object) -> None:
        raise cgroups.NotPermittedError("enough groups")

    monkeypatch.setattr(cgroups, "find_parent", lambda: cgroups.Parent(Path("/groups"), 2, is_own=True))
    monkeypatch.setattr(cgroups.Quotas, "make", refuse)
    spec = override(None, hosts=1, slow={0: "0.5"}, slow_by=slow_by)
    if slow_by == "auto":
        job = Job(spec, ["true"])
        assert job.status == 0
        assert job.notices[-1].endswith("(no CPU quota: enough groups)")
    else:
        with pytest.raises(LabError, match="not permitted here; got enough groups"):
            Job(spec, ["true"])
    assert state.labs() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_ranks(number: signal.Signals) -> None:
    name = number.name.removeprefix("SIG")
    script = f"trap 'echo got {name}; exit 5' {name}; echo up; while :; do sleep 0.05; done"
    with start_cli("run", "--hosts", "2", "--mode", "loopback", "--", "sh", "-c", script) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)]
        process.send_signal(number)
        out, _ = communicate(process, 30)
    assert sorted(out.splitlines()) == [f"[rank 0] got {name}", f"[rank 1] got {name}"]
    assert process.returncode == 5


@pytest.mark.namespaces
def test_nothing_outlives_a_killed_launcher(any_mode: Mode) -> None:
    """Not even a rank's own child in a session of its own, that ignores signals."""
    script = "(trap '' TERM HUP; setsid sleep 300 >/dev/null 2>&1 &); echo up; sleep 300"
    with start_cli("run", "--hosts", "2", "--mode", any_mode, "--", "sh", "-c", script) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)]
        (lab,) = state.labs()
        assert lab.state == "running"
        assert len(lab.pids) >= 5
        listed = json.loads(cli("list", "--json").stdout)
        assert [(row["id"], row["state"]) for row in listed["labs"]] == [(lab.record.id, "running")]
        assert cli("clean").returncode == 0
        assert len(state.labs()[0].pids) >= 5
        process.kill()
        process.wait()
    wait_until(lambda: not members(lab.record.id) and not lab.record.orchestrator.alive)
    assert state.labs()[0].state == "leftover"
    assert lab.record.id in cli("clean").stdout
    assert json.loads(cli("list", "--json").stdout)["labs"] == []


def test_clean_ends_what_a_killed_orchestrator_left() -> None:
    """Without a process namespace, killing both parents at once leaves ranks' children behind."""
    script = "(setsid sleep 300 >/dev/null 2>&1 &); echo up; sleep 300"
    with start_cli("run", "--hosts", "1", "--mode", "loopback", "--", "sh", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        (lab,) = state.labs()
        process.send_signal(signal.SIGSTOP)
        os.kill(lab.record.orchestrator.pid, signal.SIGKILL)
        process.kill()
        process.wait()
    assert members(lab.record.id)
    cleaned, stuck = state.clean()
    assert [one.record.id for one in cleaned] == [lab.record.id]
    assert stuck == []
    assert not members(lab.record.id)


def wait_until(true: object, patience_s: float = 10.0) -> None:
    assert callable(true)
    deadline = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.namespaces
def test_a_hosts_own_queue_is_short(namespaced: Mode) -> None:
    setting = "/proc/sys/net/ipv4/tcp_limit_output_bytes"
    if not Path(setting).exists():
        pytest.skip("this kernel has no such setting")
    job = Job(LabSpec(hosts=2, rate="100mbit"), ["cat", setting], mode=namespaced)
    assert [job.text_of(rank) for rank in range(2)] == [["65536"], ["65536"]]


LINK = """
from pathlib import Path
from pyroute2 import IPRoute
with IPRoute() as netlink:
    (link,) = netlink.link("get", ifname="eth0")
control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
print(control, link.get_attr("IFLA_GSO_MAX_SIZE"))
"""


@pytest.mark.namespaces
def test_connections_are_steady_and_packets_short(namespaced: Mode) -> None:
    job = Job(LabSpec(hosts=2, rate="80mbit"), [sys.executable, "-c", LINK], mode=namespaced)
    assert job.status == 0, job.lines
    assert [job.text_of(rank) for rank in range(2)] == [["reno 10000"]] * 2


@pytest.mark.namespaces
def test_hosts_have_networks_of_their_own(namespaced: Mode) -> None:
    before = sorted(os.listdir("/sys/class/net"))
    script = "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' ' | sort | tr '\\n' ' '"
    job = Job(LabSpec(hosts=2, rate="80mbit"), ["sh", "-c", script], mode=namespaced)
    for rank in range(2):
        (line,) = job.text_of(rank)
        assert {"eth0", "lo"} <= set(line.split())
        assert not {name for name in line.split() if name.startswith(("link", "bridge"))}
    assert sorted(os.listdir("/sys/class/net")) == before


@pytest.mark.namespaces
@pytest.mark.parametrize("sender", [0, 1])
def test_links_are_shaped_in_both_directions(namespaced: Mode, bulk: Path, sender: int) -> None:
    spec = LabSpec(hosts=2, rate="80mbit")
    job = Job(spec, [sys.executable, "-S", str(bulk), str(sender), "8000000"], mode=namespaced)
    assert 40 < goodput_mbps(job, 1 - sender) < 85


@pytest.mark.namespaces
def test_up_and_down_are_shaped_apart(bulk: Path) -> None:
    spec = LabSpec(hosts=2, up="160mbit", down="40mbit")
    job = Job(spec, [sys.executable, "-S", str(bulk), "0", "4000000"], mode=permitted("user"))
    assert 20 < goodput_mbps(job, 1) < 43


@pytest.mark.namespaces
@pytest.mark.parametrize("event", ["300ms link host1 down 20mbit", "0s traffic host0 host1 80mbit"])
def test_the_timeline_takes_effect(bulk: Path, event: str) -> None:
    """8 MB at 80 Mbit/s would take 0.85 s; a good part of them meets the change."""
    spec = override(None, hosts=2, rate="80mbit", timeline=[parse_event(event)])
    job = Job(spec, [sys.executable, "-S", str(bulk), "0", "8000000"], mode=permitted("user"))
    assert 10 < goodput_mbps(job, 1) < 65
    assert any(notice.startswith(f"{event.split(maxsplit=1)[0]}: ") for notice in job.notices)


@pytest.mark.namespaces
def test_gloo_works_between_hosts(tmp_path: Path) -> None:
    script = tmp_path / "reduce.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "value = torch.full((1000,), float(dist.get_rank() + 1))\n"
        "dist.all_reduce(value)\n"
        "print(value.unique().tolist())\n"
        "dist.destroy_process_group()\n"
    )
    spec = LabSpec(hosts=2, rate="200mbit")
    job = Job(spec, [sys.executable, str(script)], mode=permitted("user"), timeout_s=100)
    assert [job.text_of(rank) for rank in range(2)] == [["[3.0]"], ["[3.0]"]], job.lines


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
        (("run", "--", "true"), "no lab is described"),
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
    with pytest.raises(LabError, match=r"pip install 'headway\[lab\]'"):
        run(LabSpec(hosts=1), ["true"])
    with pytest.raises(LaunchError):
        run(LabSpec(hosts=1), [])


def test_a_callback_that_fails_ends_the_lab() -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        run(LabSpec(hosts=2), ["sh", "-c", "echo; sleep 300"], mode="loopback", on_line=fail)
    assert state.labs() == []


@pytest.fixture(autouse=True)
def nothing_stays(own_folder: None) -> Iterator[None]:
    """Held against this test's own folder of labs, so that it must end before that folder is forgotten."""
    yield
    assert [lab for lab in state.labs() if lab.pids] == []
