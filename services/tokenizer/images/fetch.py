"""Images from http(s) URLs, with limits on size, time and redirects, from public addresses only.

A name is resolved once per connection, and the socket is opened to the very address that was
checked, so a name server that changes its answer gains nothing. Redirects are followed here, one by
one, and each of them is a new connection that is checked like the first.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from yarl import URL

from services.tokenizer.images.errors import ImageError
from services.tokenizer.images.source import too_large

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
AddressInfo = tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int]]

_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK_BYTES = 1 << 16
_CONNECTIONS = 32
# uvloop raises RuntimeError for some addresses that it cannot connect to.
_FAILURES = (aiohttp.ClientError, OSError, ValueError, RuntimeError)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_HEADERS = {
    "Accept": "image/png,image/jpeg,image/webp,image/gif",
    "Accept-Encoding": "identity",
    "User-Agent": "warhorse",
}


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """What fetching one image may take; `seconds` covers all redirects together."""

    seconds: float = 10.0
    max_bytes: int = 20 << 20
    max_redirects: int = 3


class AddressRefusedError(OSError):
    """The host has an address that images must not come from."""


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public internet, whatever it is wrapped in."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or _translated(address)
        if inner is not None:
            return is_public(inner)
        if address.teredo is not None:
            return False
    return address.is_global and not address.is_multicast


def _translated(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else None


class ImageFetcher:
    """Fetches images by URL. Belongs to one event loop; uses no proxy, no cookies, no cache."""

    def __init__(
        self, limits: FetchLimits, is_allowed: Callable[[Address], bool] = is_public
    ) -> None:
        """is_allowed: which addresses may be connected to."""
        self._limits = limits
        self._is_allowed = is_allowed
        self._session: aiohttp.ClientSession | None = None

    async def fetch(self, url: str) -> bytes:
        """Return the body behind a URL. Raises ImageError."""
        try:
            async with asyncio.timeout(self._limits.seconds):
                return await self._follow(_checked(url))
        except TimeoutError:
            seconds = self._limits.seconds
            raise ImageError(f"the image did not arrive within {seconds:g} s") from None
        except _FAILURES as error:
            if _is_refusal(error):
                raise ImageError("the image's host has an address that is not allowed") from None
            raise ImageError("the image could not be fetched") from error

    async def close(self) -> None:
        """End all connections."""
        if self._session is not None:
            await self._session.close()

    async def _follow(self, url: URL) -> bytes:
        for _ in range(self._limits.max_redirects + 1):
            async with self._opened().get(url, allow_redirects=False) as response:
                if response.status not in _REDIRECTS:
                    return await self._body(response)
                target = response.headers.get("Location", "")
            url = _checked(str(url.join(URL(target))))
        limit = self._limits.max_redirects
        raise ImageError(f"the image's URL redirects more than {limit} times")

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        if response.status != 200:
            raise ImageError(f"the image's server answered with status {response.status}")
        limit = self._limits.max_bytes
        if (response.content_length or 0) > limit:
            raise too_large(limit)
        data = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            data += chunk
            if len(data) > limit:
                raise too_large(limit)
        if not data:
            raise ImageError("the image's URL holds no bytes")
        return bytes(data)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=_CONNECTIONS,
                force_close=True,
                use_dns_cache=False,
                socket_factory=self._socket,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                headers=_HEADERS,
            )
        return self._session

    def _socket(self, info: AddressInfo) -> socket.socket:
        """Make the socket for one address, the only way to a connection. Raises OSError."""
        family, kind, protocol, _, target = info
        if not self._is_allowed(ipaddress.ip_address(target[0].partition("%")[0])):
            raise AddressRefusedError("refused")
        return socket.socket(family, kind, protocol)


def _checked(text: str) -> URL:
    """Return a URL that may be asked for. Raises ImageError."""
    try:
        url = URL(text)
    except ValueError:
        raise ImageError("the image's URL is malformed") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ImageError("the image's URL must be a data URL or begin with http:// or https://")
    if url.user is not None or url.password is not None:
        raise ImageError("the image's URL must not hold a user name or password")
    return url


def _is_refusal(error: BaseException | None) -> bool:
    """Whether an address was refused somewhere below the library's own errors."""
    while error is not None:
        inner = getattr(error, "os_error", None)
        if isinstance(error, AddressRefusedError) or isinstance(inner, AddressRefusedError):
            return True
        error = error.__cause__ or error.__context__
    return False
