"""The lab's network: one namespace a host, joined by veth pairs and a bridge, each direction shaped by tbf.

Everything is built from inside a fresh network namespace, the hub, which no interface of the machine is
part of. Namespaces have no names: open file descriptors and the processes in them keep them alive, so
that nothing is left when those are gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headway.lab.isolation import CLONE_NEWNET, enter_network, own_network, unshare

INTERFACE = "eth0"
_PREFIX_LENGTH = 24
_ROOT = 0xFFFFFFFF
_HANDLE = 0x10000

BURST_BYTES = 72_090
"""The least bucket: one 64 KiB segmentation-offload packet and its headers."""
BURST_S = 0.002
QUEUE_S = 0.1
_SETTINGS = {
    # Gloo may otherwise choose a link-local address that is not yet usable.
    "ipv6/conf/default/disable_ipv6": "1",
    # A real card is handed no more than it is about to send. Here the shaper would take megabytes of a connection at
    # once, and whatever follows on another connection, be it a word that a receiver is ready, would wait behind them.
    "ipv4/tcp_limit_output_bytes": "65536",
    # BBR, which some machines have as their default, tries other rates all the while: where several connections share
    # a link, the same collective takes up to a third longer one time than another. Over links as short as these Reno
    # does what CUBIC does, and every host may choose it.
    "ipv4/tcp_congestion_control": "reno",
}
PACKET_S = 0.001
PACKET_LEAST_BYTES, PACKET_MOST_BYTES = 4096, 65_536
QUEUE_LEAST_BYTES = 256 * 2**10
QUEUE_MOST_BYTES = 4 * 2**20


def address(index: int) -> str:
    """The address of host ``index`` (0 to 253)."""
    return f"10.77.0.{index + 1}"


def bucket(rate_gbps: float) -> dict[str, int]:
    """The tbf settings for a rate: bytes a second, burst and queue in bytes."""
    bytes_per_s = max(1, round(rate_gbps * 1e9 / 8))
    return {
        "rate": bytes_per_s,
        "burst": max(BURST_BYTES, round(bytes_per_s * BURST_S)),
        "limit": min(max(QUEUE_LEAST_BYTES, round(bytes_per_s * QUEUE_S)), QUEUE_MOST_BYTES),
    }


def packet_bytes(rate_gbps: float) -> int:
    """The most that a connection hands to a link of this rate at once: what it sends in a millisecond.

    Segmentation offload makes packets of 64 KiB, behind which other connections wait for as long as these take:
    nothing on a fast link, several milliseconds on those that a lab scales down.
    """
    return min(max(PACKET_LEAST_BYTES, round(rate_gbps * 1e9 / 8 * PACKET_S)), PACKET_MOST_BYTES)


class Network:
    """Hosts' namespaces around the hub that the calling thread is in when the object is made."""

    def __init__(self, rates_gbps: Sequence[tuple[float | None, float | None]]) -> None:
        """Build one host for each (up, down); None is unshaped. Raises OSError or pyroute2's NetlinkError."""
        from pyroute2 import IPRoute

        self._hub = own_network()
        self._hosts: list[int] = []
        with IPRoute() as netlink:
            netlink.link("set", index=1, state="up")
            netlink.link("add", ifname="bridge", kind="bridge")
            bridge = _index(netlink, "bridge")
            netlink.link("set", index=bridge, state="up")
            for index in range(len(rates_gbps)):
                self._add_host(netlink, bridge, index)
        for index, (up_gbps, down_gbps) in enumerate(rates_gbps):
            self.shape(index, up_gbps=up_gbps, down_gbps=down_gbps)

    def _add_host(self, netlink: Any, bridge: int, index: int) -> None:
        from pyroute2 import IPRoute

        try:
            unshare(CLONE_NEWNET)
            self._hosts.append(own_network())
            for setting, value in _SETTINGS.items():
                with suppress(OSError):
                    Path("/proc/sys/net", setting).write_text(value)
        finally:
            enter_network(self._hub)
        peer = {"ifname": INTERFACE, "net_ns_fd": self._hosts[index]}
        netlink.link("add", ifname=f"link{index}", kind="veth", peer=peer)
        netlink.link("set", index=_index(netlink, f"link{index}"), master=bridge, state="up")
        with self.inside(index), IPRoute() as host:
            host.link("set", index=1, state="up")
            interface = _index(host, INTERFACE)
            host.addr("add", index=interface, address=address(index), prefixlen=_PREFIX_LENGTH)
            host.link("set", index=interface, state="up")

    def namespace(self, index: int) -> int:
        """The file descriptor of host ``index``'s namespace."""
        return self._hosts[index]

    @contextmanager
    def inside(self, index: int) -> Iterator[None]:
        """Do the block in host ``index``'s namespace, then return to the hub."""
        enter_network(self._hosts[index])
        try:
            yield
        finally:
            enter_network(self._hub)

    def shape(self, index: int, *, up_gbps: float | None = None, down_gbps: float | None = None) -> None:
        """Set the rate of host ``index``'s link, in the directions given, without losing what is queued."""
        from pyroute2 import IPRoute
        from pyroute2.netlink.exceptions import NetlinkError

        if up_gbps is not None:
            with self.inside(index), IPRoute() as netlink:
                interface = _index(netlink, INTERFACE)
                _shape(netlink, interface, up_gbps)
                with suppress(NetlinkError):  # not every kernel lets a namespace choose
                    netlink.link("set", index=interface, gso_max_size=packet_bytes(up_gbps))
        if down_gbps is not None:
            with IPRoute() as netlink:
                _shape(netlink, _index(netlink, f"link{index}"), down_gbps)

    def connect(self, index: int, *, up: bool) -> None:
        """Plug host ``index``'s cable in, or pull it: what is sent then is lost, and connections are not told."""
        from pyroute2 import IPRoute

        with IPRoute() as netlink:
            netlink.link("set", index=_index(netlink, f"link{index}"), state="up" if up else "down")

    def close(self) -> None:
        """Let the namespaces go."""
        for namespace in (*self._hosts, self._hub):
            os.close(namespace)


def _index(netlink: Any, name: str) -> int:
    return int(netlink.link_lookup(ifname=name)[0])


def _shape(netlink: Any, interface: int, rate_gbps: float) -> None:
    netlink.tc("replace", "tbf", index=interface, handle=_HANDLE, parent=_ROOT, **bucket(rate_gbps))
