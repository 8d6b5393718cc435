"""Tell gloo and NCCL the network interface of a machine, because they may guess a wrong one."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence

import psutil

NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that gloo and NCCL read. Without them gloo uses the interface that the machine's name resolves to, often
the loopback, and NCCL the first one that is not the loopback."""


def network_variables(driver: Mapping[str, str], *, address: str) -> dict[str, str]:
    """Variables that tell gloo and NCCL the interface at which other machines reach this one, which has this address.

    Args:
        driver: the driver's environment.
    """
    interfaces = {name: [entry.address for entry in entries] for name, entries in psutil.net_if_addrs().items()}
    return interface_variables(address, interfaces, of_node=os.environ, of_driver=driver)


def loopback_variables() -> dict[str, str]:
    """Variables with which gloo listens on the loopback interface only."""
    interfaces = psutil.net_if_addrs().items()
    loopback = next((name for name, entries in interfaces if any(e.address == "127.0.0.1" for e in entries)), None)
    return {} if loopback is None or os.environ.get(NAMES[0]) else {NAMES[0]: loopback}


def interface_variables(
    address: str,
    interfaces: Mapping[str, Sequence[str]],
    *,
    of_node: Mapping[str, str],
    of_driver: Mapping[str, str],
) -> dict[str, str]:
    """Variables that a process on a machine with this address adds to its environment.

    The user's values take precedence: first the machine's own environment (that of its `ray start`), then the driver's.

    Args:
        interfaces: interface -> addresses of this machine.
        of_node: the environment of this process.
        of_driver: the driver's environment.
    """
    name = interface_of(address, interfaces)
    # NCCL reads a plain name as a prefix: eth1 would match eth10, too.
    chosen = {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    from_driver = {variable: of_driver[variable] for variable in NAMES if of_driver.get(variable)}
    return {variable: value for variable, value in (chosen | from_driver).items() if not of_node.get(variable)}


def interface_of(address: str, interfaces: Mapping[str, Sequence[str]]) -> str | None:
    """Return the interface with this address, IPv4 or IPv6; None for a loopback address, or if no interface has it
    (NAT)."""
    parsed = _parse(address)
    if parsed is None or parsed.is_loopback:
        return None
    return next((name for name, addresses in interfaces.items() if parsed in map(_parse, addresses)), None)


def _parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address without its zone (`fe80::1%eth0`); None if it is not an IP address, such as a MAC address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
