"""Download an image or a video from a public address within limits of size and time."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from vlmrl.errors import DataError

if TYPE_CHECKING:
    import httpx

LIMIT_S = 30.0
"""Seconds for a whole download: name resolution, connections, redirects and body."""
_MAX_REDIRECTS = 5
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class _RefusedError(Exception):
    """A response or an address is refused; the message gives the reason."""


def is_public(address: str) -> bool:
    """Whether an IP address is on the public internet.

    Loopback, private, link-local (where clouds serve credentials) and multicast addresses are not. An IPv4 address
    embedded in an IPv6 one is checked as IPv4.

    Raises:
        ValueError: `address` is not an IP address.
    """
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if ip.is_site_local or ip.teredo is not None:
            return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


def download(
    url: str,
    name: str,
    *,
    max_bytes: int,
    setting: str = "data.max_image_mib",
    limit_s: float = LIMIT_S,
    is_allowed: Callable[[str], bool] = is_public,
) -> bytes:
    """Return the body at `url`; `name` is its name in messages, and `setting` that of `max_bytes`.

    Each host is resolved, its address checked, and the connection made to that same address, also after redirects.
    Proxies from the environment are not used: they would choose the address themselves.

    Raises:
        DataError: the download fails or takes more than `limit_s` seconds, has more than `max_bytes` bytes, or is at an
            address that `is_allowed` refuses.
    """
    result: Future[bytes] = Future()

    def work() -> None:
        try:
            result.set_result(asyncio.run(_within(url, _Limit(max_bytes, setting), limit_s, is_allowed)))
        except BaseException as error:  # raised again in the calling thread
            result.set_exception(error)

    # In a daemon thread, since a call to a silent name server cannot be interrupted.
    threading.Thread(target=work, name="vlmrl-download", daemon=True).start()
    try:
        return result.result(limit_s + 1)
    except TimeoutError as error:
        raise DataError(f"{name} cannot be downloaded: it takes longer than {limit_s:g} s") from error
    except Exception as error:  # untrusted URLs and servers make httpx raise nearly anything
        reasons = str(error).splitlines() or [type(error).__name__]
        raise DataError(f"{name} cannot be downloaded: {reasons[0]}") from error


class _Limit(NamedTuple):
    """Most bytes of a body, and the setting that they come from."""

    max_bytes: int
    setting: str


async def _within(url: str, limit: _Limit, limit_s: float, is_allowed: Callable[[str], bool]) -> bytes:
    async with asyncio.timeout(limit_s):
        return await _follow(url, limit, is_allowed)


async def _follow(text: str, limit: _Limit, is_allowed: Callable[[str], bool]) -> bytes:
    import httpx

    # No proxies, no .netrc, no cookies, no compressed body.
    async with httpx.AsyncClient(trust_env=False, timeout=None, headers={"Accept-Encoding": "identity"}) as client:
        url = httpx.URL(text)
        for _ in range(_MAX_REDIRECTS + 1):
            request = client.build_request("GET", url.copy_with(host=await _address(url, is_allowed)))
            request.headers["Host"] = url.netloc.decode("ascii").rpartition("@")[2]
            # The certificate must match the host name, not the address.
            request.extensions["sni_hostname"] = url.raw_host.decode("ascii")
            response = await client.send(request, stream=True)
            try:
                if not response.has_redirect_location:
                    return await _body(response, limit)
                url = url.join(response.headers["location"])
            finally:
                await response.aclose()
    raise _RefusedError(f"more than {_MAX_REDIRECTS} redirects")


async def _address(url: httpx.URL, is_allowed: Callable[[str], bool]) -> str:
    """Resolve the host of `url` to an address that `is_allowed` accepts."""
    if url.scheme not in ("http", "https") or not url.host:
        raise _RefusedError("it redirects to an address that is not http(s)")
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(
            url.raw_host.decode("ascii"), port, type=socket.SOCK_STREAM
        )
    except (OSError, UnicodeError) as error:
        raise _RefusedError(f"host {url.host} cannot be resolved") from error
    addresses = [str(address[0]) for *_, address in infos]
    private = [address for address in addresses if not is_allowed(address)]
    if private or not addresses:
        raise _RefusedError(f"host {url.host} is at {', '.join(private) or 'no address'}, which is not public")
    return addresses[0]


async def _body(response: httpx.Response, limit: _Limit) -> bytes:
    if response.status_code != 200:
        raise _RefusedError(f"status {response.status_code}")
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise _RefusedError(
            f"its content encoding is {response.headers['Content-Encoding'][:40]}, which was not requested"
        )
    content = bytearray()
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > limit.max_bytes:
            raise _RefusedError(f"it is larger than {limit.max_bytes / 2**20:g} MiB: raise {limit.setting}")
    return bytes(content)
