"""Download of an image from a public address, within a number of bytes and of seconds."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from vlmrl.errors import DataError

if TYPE_CHECKING:
    import httpx

LIMIT_S = 30.0
"""For the whole of a download: names, connections, redirects and body."""
_MOST_REDIRECTS = 5
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class _RefusedError(Exception):
    """An answer or an address that is not taken; the text says why."""


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the internet at large: not to this machine, to a private network, to the link
    (where clouds serve credentials), or to a group. An IPv4 address that is written as an IPv6 one is judged as IPv4.

    Raises:
        ValueError: it is no IP address.
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
    url: str, name: str, *, max_bytes: int, limit_s: float = LIMIT_S, is_allowed: Callable[[str], bool] = is_public
) -> bytes:
    """The body at `url`; `name` is what messages call it.

    Every address is checked after its name was resolved, and it is the checked address that is connected to, at first
    and after each redirect. A proxy that the environment names is not used: it would choose the address itself.

    Raises:
        DataError: the body cannot be had within `limit_s` seconds, has more than `max_bytes` bytes, or is at an address
            that `is_allowed` refuses.
    """
    found: Future[bytes] = Future()

    def work() -> None:
        try:
            found.set_result(asyncio.run(_within(url, max_bytes, limit_s, is_allowed)))
        except BaseException as error:  # it is the caller's, whatever it is
            found.set_exception(error)

    # A thread that may be left behind: a name server that does not answer cannot be interrupted.
    threading.Thread(target=work, name="vlmrl-download", daemon=True).start()
    try:
        return found.result(limit_s + 1)
    except TimeoutError as error:
        raise DataError(f"{name} cannot be downloaded: it takes longer than {limit_s:g} s") from error
    except Exception as error:  # URLs of strangers and answers of their servers make httpx raise nearly anything
        said = str(error).splitlines() or [type(error).__name__]
        raise DataError(f"{name} cannot be downloaded: {said[0]}") from error


async def _within(url: str, max_bytes: int, limit_s: float, is_allowed: Callable[[str], bool]) -> bytes:
    async with asyncio.timeout(limit_s):
        return await _follow(url, max_bytes, is_allowed)


async def _follow(text: str, max_bytes: int, is_allowed: Callable[[str], bool]) -> bytes:
    import httpx

    # No proxies, no .netrc, no cookies, and never a body that has to be unpacked.
    async with httpx.AsyncClient(trust_env=False, timeout=None, headers={"Accept-Encoding": "identity"}) as client:
        url = httpx.URL(text)
        for _ in range(_MOST_REDIRECTS + 1):
            request = client.build_request("GET", url.copy_with(host=await _address(url, is_allowed)))
            request.headers["Host"] = url.netloc.decode("ascii").rpartition("@")[2]
            request.extensions["sni_hostname"] = url.raw_host.decode("ascii")  # whose certificate is asked for
            answer = await client.send(request, stream=True)
            try:
                if not answer.has_redirect_location:
                    return await _body(answer, max_bytes)
                url = url.join(answer.headers["location"])
            finally:
                await answer.aclose()
    raise _RefusedError(f"more than {_MOST_REDIRECTS} redirects")


async def _address(url: httpx.URL, is_allowed: Callable[[str], bool]) -> str:
    """The IP address to connect to, checked."""
    if url.scheme not in ("http", "https") or not url.host:
        raise _RefusedError("a redirect to what is no http address")
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            url.raw_host.decode("ascii"), port, type=socket.SOCK_STREAM
        )
    except (OSError, UnicodeError) as error:
        raise _RefusedError(f"host {url.host} is not known") from error
    addresses = [str(address[0]) for *_, address in found]
    private = [address for address in addresses if not is_allowed(address)]
    if private or not addresses:
        raise _RefusedError(f"host {url.host} is at {', '.join(private) or 'no address'}, which is not a public one")
    return addresses[0]


async def _body(answer: httpx.Response, max_bytes: int) -> bytes:
    if answer.status_code != 200:
        raise _RefusedError(f"status {answer.status_code}")
    if answer.headers.get("Content-Encoding", "identity") != "identity":
        raise _RefusedError(f"it is encoded as {answer.headers['Content-Encoding'][:40]}, which was not asked for")
    content = bytearray()
    async for chunk in answer.aiter_raw():
        content += chunk
        if len(content) > max_bytes:
            raise _RefusedError(f"it is larger than {max_bytes / 2**20:g} MiB: raise data.max_image_mib")
    return bytes(content)
