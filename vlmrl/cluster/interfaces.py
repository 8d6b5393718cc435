"""The network interface by which a machine of a run is reached, for the libraries that would guess another one."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence

NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables by which gloo and NCCL are told. Without them gloo takes the interface that the machine's name resolves to,
which is often the loopback, and NCCL the first one that is not."""


def interface_variables(
    address: str,
    interfaces: Mapping[str, Sequence[str]],
    *,
    of_node: Mapping[str, str],
    of_driver: Mapping[str, str],
) -> dict[str, str]:
    """What a process on a machine with this address adds to its environment.

    What the user set wins: the machine's own environment (that of its `ray start`) over the driver's.

    Args:
        interfaces: the machine's interfaces, each with its addresses.
        of_node: the process's environment.
        of_driver: the driver's.
    """
    name = interface_of(address, interfaces)
    # NCCL takes a bare name for the beginning of one: eth1 would be eth10, too.
    chosen = {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    given = {variable: of_driver[variable] for variable in NAMES if of_driver.get(variable)}
    return {variable: value for variable, value in (chosen | given).items() if not of_node.get(variable)}


def interface_of(address: str, interfaces: Mapping[str, Sequence[str]]) -> str | None:
    """The interface that carries `address`, IPv4 or IPv6; None for a loopback address, and where no interface has it,
    as behind a translation of addresses."""
    wanted = _parsed(address)
    if wanted is None or wanted.is_loopback:
        return None
    return next((name for name, held in interfaces.items() if wanted in map(_parsed, held)), None)


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address without its zone (`fe80::1%eth0`); None for what is none, as a link's own address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
