"""Images behind URLs: limits, redirects, and addresses that must not be reached."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.tokenizer.images.errors import ImageError
from services.tokenizer.images.fetch import FetchLimits, ImageFetcher, is_public

LOOPBACK = ipaddress.ip_address("127.0.0.1")
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s"
Replies = dict[str, bytes]


class Site:
    """An HTTP server on the loopback address that answers paths with given bytes."""

    def __init__(self, replies: Replies) -> None:
        self.replies = replies
        self.requests: list[str] = []
        self.port = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        self.requests.append(head)
        writer.write(self.replies[path])
        if path != "/stalls":
            writer.close()

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


@asynccontextmanager
async def serving(replies: Replies) -> AsyncIterator[Site]:
    site = Site(replies)
    server = await asyncio.start_server(site.handle, "127.0.0.1", 0)
    site.port = server.sockets[0].getsockname()[1]
    try:
        yield site
    finally:
        server.close()


@asynccontextmanager
async def fetching(**limits: Any) -> AsyncIterator[ImageFetcher]:
    """A fetcher for which the loopback address alone is as good as a public one."""
    fetcher = ImageFetcher(FetchLimits(**limits), lambda address: address == LOOPBACK)
    try:
        yield fetcher
    finally:
        await fetcher.close()


def found(data: bytes) -> bytes:
    return ANSWER % (len(data), data)


def moved(target: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n".encode()


async def refused(fetch: Awaitable[bytes]) -> str:
    with pytest.raises(ImageError) as caught:
        await fetch
    return str(caught.value)


async def test_bytes_behind_a_url_and_behind_a_name() -> None:
    async with serving({"/a.png": found(b"pixels")}) as site, fetching() as fetcher:
        assert await fetcher.fetch(site.url("/a.png")) == b"pixels"
        assert await fetcher.fetch(site.url("/a.png", "localhost")) == b"pixels"
    assert "accept-encoding: identity" in site.requests[0].lower()
    assert "cookie" not in site.requests[1].lower()


async def test_redirects_are_followed_up_to_the_limit() -> None:
    replies = {"/0": moved("/1"), "/1": moved("/2"), "/2": found(b"x"), "/loop": moved("/loop")}
    async with serving(replies) as site, fetching(max_redirects=2) as fetcher:
        assert await fetcher.fetch(site.url("/0")) == b"x"
        assert "redirects more than 2 times" in await refused(fetcher.fetch(site.url("/loop")))
    assert len(site.requests) == 3 + 3


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("http://169.254.169.254/latest/meta-data", "address that is not allowed"),
        ("http://[::1]/x", "address that is not allowed"),
        ("file:///etc/passwd", "begin with http:// or https://"),
        ("ftp://example.com/x", "begin with http:// or https://"),
        ("http://a:b@example.com/x", "must not hold a user name"),
    ],
)
async def test_every_redirect_is_checked_like_the_first_url(target: str, message: str) -> None:
    async with serving({"/": moved(target)}) as site, fetching() as fetcher:
        assert message in await refused(fetcher.fetch(site.url("/")))


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "127.1", "2130706433"],
)
async def test_private_address_is_never_connected_to(host: str) -> None:
    async with serving({"/": found(b"secret")}) as site:
        fetcher = ImageFetcher(FetchLimits())
        message = await refused(fetcher.fetch(site.url("/", host)))
        await fetcher.close()
    assert site.requests == []
    assert "not allowed" in message or "could not be fetched" in message


async def test_address_is_checked_where_the_socket_is_opened() -> None:
    """A name that is public when asked for and private when connected to gains nothing."""
    seen: list[str] = []

    def policy(address: Any) -> bool:
        seen.append(str(address))
        return len(seen) > 1

    async with serving({"/": found(b"x")}) as site:
        fetcher = ImageFetcher(FetchLimits(), policy)
        assert "not allowed" in await refused(fetcher.fetch(site.url("/")))
        assert await fetcher.fetch(site.url("/")) == b"x"
        await fetcher.close()
    assert seen == ["127.0.0.1", "127.0.0.1"] and len(site.requests) == 1


BROKEN = {
    "/announced": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n",
        "more than the 100 bytes",
    ),
    "/endless": (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 200, "more than the 100 bytes"),
    "/gone": (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "status 404"),
    "/empty": (found(b""), "no bytes"),
    "/cut": (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nabc", "could not be fetched"),
    "/noise": (b"\x00\xff\x00\xff\r\n\r\n", "could not be fetched"),
    "/nowhere": (b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n", "redirects more than"),
    "/stalls": (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nabc", "did not arrive within 0.2 s"),
}


@pytest.mark.parametrize("path", BROKEN)
async def test_broken_answer_is_refused_with_its_reason(path: str) -> None:
    reply, message = BROKEN[path]
    async with (
        serving({path: reply}) as site,
        fetching(max_bytes=100, seconds=0.2 if path == "/stalls" else 10.0) as fetcher,
    ):
        assert message in await refused(fetcher.fetch(site.url(path)))


async def test_host_that_does_not_exist_or_listen_is_refused() -> None:
    async with serving({}) as site:
        closed = site.url("/")
    async with fetching() as fetcher:
        assert "could not be fetched" in await refused(fetcher.fetch(closed))
        assert "could not be fetched" in await refused(fetcher.fetch("http://name.invalid/x"))
        assert "malformed" in await refused(fetcher.fetch("http://[::1/x"))


PUBLIC = ["93.184.216.34", "8.8.8.8", "2606:2800:220:1:248:1893:25c8:1946", "::ffff:8.8.8.8"]
PRIVATE = [
    *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("0.0.0.0", "224.0.1.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "192.0.2.1"),
    *("::", "::1", "fe80::1", "fc00::1", "fd12::1", "ff02::1", "ff0e::1", "2001:db8::1"),
    *("::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::"),
]


@pytest.mark.parametrize("text", [*PUBLIC, *PRIVATE])
def test_what_counts_as_a_public_address(text: str) -> None:
    check: Callable[[Any], bool] = is_public
    assert check(ipaddress.ip_address(text)) == (text in PUBLIC)
