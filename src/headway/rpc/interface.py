"""Finds the address at which other processes of a job reach this machine."""

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
    """Return this machine's name, or HEADWAY_HOST if set: emulated hosts of a lab share one machine."""
    return os.environ.get("HEADWAY_HOST") or socket.gethostname()


def job_address() -> str:
    """Return this machine's address: of the interface in GLOO_SOCKET_IFNAME, else of the route to MASTER_ADDR.

    Without either, it is the address of the host name, as for Gloo. That may be a loopback address even if other ranks
    are on other hosts: many host names resolve to 127.0.1.1 locally.
    """
    return _chosen_interface_address() or address_towards(os.environ.get("MASTER_ADDR", "")) or _of_the_host()


def reachable_address(candidates: Sequence[str], rank: int) -> str:
    """Return the address of ``rank``, given the ``candidates`` that the ranks found individually.

    A rank whose candidate is a loopback address takes the address of its route to another rank, if there is one.
    """
    if not is_loopback(candidates[rank]):
        return candidates[rank]
    targets = (towards for towards in candidates if not is_loopback(towards))
    addresses = (address_towards(target) for target in targets)
    return next((address for address in addresses if address and not is_loopback(address)), candidates[rank])


def is_on_one_host() -> bool:
    """Whether the environment says that all processes of the job are on this host."""
    world_size = os.environ.get("WORLD_SIZE")
    if world_size is not None and os.environ.get("LOCAL_WORLD_SIZE") == world_size:
        return True
    address = _chosen_interface_address()
    if address is not None:
        return is_loopback(address)
    master = os.environ.get("MASTER_ADDR", "")
    return master == "localhost" or is_loopback(master)


def is_loopback(address: str) -> bool:
    """Whether ``address`` is a loopback IP address. False for host names."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def format_address(host: str, port: int) -> str:
    """``HOST:PORT``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_towards(host: str) -> str | None:
    """Return the local address of the route to ``host``; None if there is no route."""
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
