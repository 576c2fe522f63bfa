"""Which address of this machine the other processes of a job use."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Sequence

LOOPBACK = "127.0.0.1"
EVERY_ADDRESS = ""
_ANY_PORT = 9  # of a datagram socket that sends nothing
_SIOCGIFADDR = 0x8915
_NAME_BYTES = 15


def host_name() -> str:
    """This machine's name; that of an imitated host, where HEADWAY_HOST gives it one: those of a lab share a name."""
    return os.environ.get("HEADWAY_HOST") or socket.gethostname()


def job_address() -> str:
    """This machine's address in the job: on the interface that Gloo is told to use, else on the way to the master.

    Without either it is that of the host's name, as for Gloo. It may be a loopback address although other ranks are on
    other hosts: many a host's name stands for 127.0.1.1 on the host itself.
    """
    return _chosen_interface_address() or address_towards(os.environ.get("MASTER_ADDR", "")) or _of_the_host()


def reachable_address(candidates: Sequence[str], rank: int) -> str:
    """This machine's address, given those that every rank found on its own, where one was mistaken.

    A rank that found a loopback address takes, unless all did, the one on the way to another.
    """
    if not is_loopback(candidates[rank]):
        return candidates[rank]
    targets = (towards for towards in candidates if not is_loopback(towards))
    addresses = (address_towards(target) for target in targets)
    return next((address for address in addresses if address and not is_loopback(address)), candidates[rank])


def is_on_one_host() -> bool:
    """Whether the job says of itself that all of its processes are on this host."""
    world_size = os.environ.get("WORLD_SIZE")
    if world_size is not None and os.environ.get("LOCAL_WORLD_SIZE") == world_size:
        return True
    address = _chosen_interface_address()
    if address is not None:
        return is_loopback(address)
    master = os.environ.get("MASTER_ADDR", "")
    return master == "localhost" or is_loopback(master)


def is_loopback(address: str) -> bool:
    """Whether ``address`` reaches no further than this machine. A name is no address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def format_address(host: str, port: int) -> str:
    """``HOST:PORT``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_towards(host: str) -> str | None:
    """The address that a packet to ``host`` would carry; None where there is no way to it."""
    if not host:
        return None
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: a datagram socket only looks up the route
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _chosen_interface_address() -> str | None:
    """The IPv4 address of the first interface in GLOO_SOCKET_IFNAME that has one."""
    for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        if name and (address := _of_interface(name)):
            return address
    return None


def _of_interface(name: str) -> str | None:
    try:
        import fcntl
    except ImportError:  # no Unix
        return None
    request = struct.pack("256s", name.encode()[:_NAME_BYTES])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
        except OSError:  # no such interface, or without an IPv4 address
            return None
    return socket.inet_ntoa(answer[20:24])


def _of_the_host() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return LOOPBACK
