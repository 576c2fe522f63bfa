"""Enter fresh namespaces, then become the lab's orchestrator.

Run as a script by `headway.lab.launch`. Until it is in the namespaces, it uses only the standard library: a
process with several threads may not enter a user namespace, and libraries start threads when imported.

The process tree is launcher, this process, and (with a process namespace) its child as process 1 of that
namespace. Each dies with its parent, and with process 1 dies everything in the lab. Without a process
namespace this process outlives the launcher for the moment it takes to end everything itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MS_REC = 0x4000
_MS_PRIVATE = 1 << 18
_MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Move into new namespaces of the kinds in ``flags``. Raises OSError if that is not permitted."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def enter_network(namespace: int) -> None:
    """Move the calling thread into the network namespace behind file descriptor ``namespace``."""
    _check(_libc.setns(ctypes.c_int(namespace), ctypes.c_int(CLONE_NEWNET)), "setns")


def own_network() -> int:
    """A file descriptor that keeps the calling thread's network namespace alive."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent dies, however it dies."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent died."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0), "prctl(PR_SET_CHILD_SUBREAPER)")


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    encoded = None if kind is None else kind.encode()
    _check(
        _libc.mount(source.encode(), target.encode(), encoded, ctypes.c_ulong(flags), None),
        f"mounting {target}",
    )


def _enter_user_namespace() -> None:
    """Keep our own user and group; the namespace only lends the rights to build networks."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")


def isolate(mode: str, *, processes: bool) -> None:
    """Enter the namespaces of ``mode`` (``root``, ``user`` or ``loopback``: none).

    With ``processes`` the function returns in a child that is process 1 of a fresh process namespace, with
    a /proc of its own; the calling process waits for it and exits with its status. Raises OSError (in either
    of them) if something is not permitted.
    """
    if mode == "user":
        _enter_user_namespace()
    if mode != "loopback":
        unshare(CLONE_NEWNET | CLONE_NEWNS | (CLONE_NEWPID if processes else 0))
        _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    if not processes:
        adopt_orphans()
        return
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    die_with_parent()
    _mount("proc", "/proc", "proc", _MS_NOSUID_NODEV_NOEXEC)


def main() -> None:
    """Isolate as the arguments say (control socket, mode, process namespace), then serve the launcher."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    mode, processes = sys.argv[2], sys.argv[3] == "processes"
    if processes:
        die_with_parent()
    try:
        isolate(mode, processes=processes)
    except OSError as failure:
        control.sendall((json.dumps({"refused": failure.strerror}) + "\n").encode())
        os._exit(0)

    from headway.lab.orchestrator import serve

    serve(control, networks=mode != "loopback", pid_namespace=processes)


if __name__ == "__main__":
    main()
