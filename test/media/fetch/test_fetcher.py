"""Against a server on loopback. The resolver is that of the test, so no test needs a network."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lightserve.errors import InvalidRequestError, OverloadedError
from lightserve.media.fetch import fetcher
from lightserve.media.fetch.fetcher import MAX_PER_HOST, MEDIA_FLAGS, Fetcher
from lightserve.outbound.addresses import NOT_PUBLIC
from lightserve.outbound.urls import UrlRules
from test.media.fetch.image_host import TLS, ImageHost, answer, image_host, redirect

IMAGE = b"\x89PNG of a cat"
LOCAL = UrlRules(MEDIA_FLAGS, private_hosts=("localhost",))


def make_fetcher(
    rules: UrlRules = LOCAL, found: Sequence[str] = ("127.0.0.1",), timeout_s: float = 10.0, max_bytes: int = 10**6
) -> Fetcher:
    """Every name has the addresses ``found``."""
    made = Fetcher(rules, max_bytes, timeout_s, lambda host, port: list(found))
    made.tls = ssl.create_default_context(cafile=str(TLS / "authority.pem"))
    return made


def fetched(
    answers: Callable[[str], bytes | None], fetch: Callable[[ImageHost], Any], is_tls: bool = True
) -> tuple[Any, ImageHost]:
    async def run() -> tuple[Any, ImageHost]:
        async with image_host(answers, is_tls) as host:
            return await fetch(host), host

    return asyncio.run(run())


def refusal(answers: Callable[[str], bytes | None], **options: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        fetched(answers, lambda host: make_fetcher(**options).fetch(host.url()))
    return str(caught.value)


def test_an_image_is_fetched_by_https() -> None:
    data, host = fetched(lambda target: answer(IMAGE), lambda host: make_fetcher().fetch(host.url("/a/cat.png?x=1")))

    assert data == IMAGE
    lines = host.heads[0].splitlines()
    assert lines[0] == "GET /a/cat.png?x=1 HTTP/1.1"
    assert f"Host: localhost:{host.port}" in lines
    assert "Accept-Encoding: identity" in lines
    assert not [line for line in lines if line.lower().startswith(("cookie", "authorization", "referer"))]


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    data, _ = fetched(lambda target: answer(IMAGE), lambda host: make_fetcher().fetch(host.url()))

    assert data == IMAGE


def test_a_body_without_length_and_one_in_chunks_are_read() -> None:
    answers = {
        "/until-end": b"HTTP/1.1 200 OK\r\n\r\n" + IMAGE,
        "/chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
        "/hints": b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + answer(IMAGE),
    }

    async def fetch(host: ImageHost) -> list[bytes]:
        made = make_fetcher()
        return [await made.fetch(host.url(path)) for path in answers]

    assert fetched(answers.__getitem__, fetch)[0] == [IMAGE, b"abcde", IMAGE]


def test_a_certificate_of_another_host_is_refused() -> None:
    rules = UrlRules(MEDIA_FLAGS, private_hosts=("cat.example",))

    async def fetch(host: ImageHost) -> bytes:
        return await make_fetcher(rules).fetch(host.url(host="cat.example"))

    with pytest.raises(InvalidRequestError, match="cannot be reached"):
        fetched(lambda target: answer(IMAGE), fetch)


@pytest.mark.parametrize("found", [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], []], ids=str)
def test_a_host_that_is_not_public_is_not_dialled(found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the answer is the same for a name that nobody knows."""
    monkeypatch.setattr(fetcher, "get", None)
    made = make_fetcher(UrlRules(MEDIA_FLAGS), found)

    with pytest.raises(InvalidRequestError) as caught:
        asyncio.run(made.fetch("https://inside.example/"))
    assert str(caught.value) == NOT_PUBLIC.format(flag="--media_private_hosts")


def test_a_host_is_looked_up_once_and_its_checked_address_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is public at first and private afterwards does not lead into a private network."""
    asked: list[str] = []
    dialled: list[Sequence[str]] = []

    def look_up(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["8.8.8.8"] if len(asked) == 1 else ["127.0.0.1"]

    async def connect(address: str, port: int, **options: Any) -> Any:
        dialled.append(address)
        raise OSError

    monkeypatch.setattr(asyncio, "open_connection", connect)
    with pytest.raises(InvalidRequestError, match="cannot be reached"):
        asyncio.run(Fetcher(UrlRules(MEDIA_FLAGS), 10**6, 10.0, look_up).fetch("https://a.example/"))

    assert (asked, dialled) == (["a.example"], ["8.8.8.8"])


def test_redirects_are_followed() -> None:
    answers = {"/cat.png": redirect("/b"), "/b": redirect("c?x=1"), "/c?x=1": redirect("d"), "/d": answer(IMAGE)}

    data, host = fetched(answers.__getitem__, lambda host: make_fetcher().fetch(host.url()))

    assert data == IMAGE
    assert len(host.heads) == 4


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("/cat.png", "redirects more than 3 times"),
        ("https://127.0.0.1/", "has no public address"),
        ("https://inside.example/", "has no public address"),
        ("http://localhost/", "begins with http:"),
        ("https://other.example:22/", "has port 22"),
        ("file:///etc/passwd", "something else than https:"),
    ],
)
def test_redirects_are_checked_like_the_url(location: str, message: str) -> None:
    assert message in refusal(lambda target: redirect(location))


def test_http_is_fetched_where_the_operator_allows_it() -> None:
    rules = UrlRules(MEDIA_FLAGS, private_hosts=("localhost",), allows_http=True)

    data, _ = fetched(
        lambda target: answer(IMAGE), lambda host: make_fetcher(rules).fetch(host.url(scheme="http")), is_tls=False
    )

    assert data == IMAGE


def test_answers_that_are_no_image_are_refused() -> None:
    assert refusal(lambda target: answer(b"", status=404)) == "its server answered with status 404"
    assert "compressed" in refusal(lambda target: answer(IMAGE, "Content-Encoding: gzip"))
    assert "broken or incomplete" in refusal(lambda target: answer(IMAGE)[:-3])
    assert "broken or incomplete" in refusal(lambda target: b"SSH-2.0-OpenSSH\r\n")
    assert "broken or incomplete" in refusal(lambda target: b"HTTP/1.1 200 OK\r\nX: " + b"x" * 10**6)
    assert "broken or incomplete" in refusal(lambda target: b"")


def test_an_answer_that_is_too_long_is_not_read_to_its_end() -> None:
    long = b"x" * 1_000_001

    assert "more than 1 MB (--max_image_mb)" in refusal(lambda target: answer(long))
    assert "more than 1 MB" in refusal(lambda target: b"HTTP/1.1 200 OK\r\n\r\n" + long)
    assert "more than 1 MB" in refusal(lambda target: b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n")


def test_a_host_that_hangs_is_given_up() -> None:
    assert "did not arrive within 0.2 s (--media_timeout)" in refusal(lambda target: None, timeout_s=0.2)


def test_a_resolver_that_hangs_is_given_up() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        released = asyncio.Event()

        def look_up(host: str, port: int) -> list[str]:
            asyncio.run_coroutine_threadsafe(released.wait(), loop).result()
            return []

        with pytest.raises(InvalidRequestError, match=r"did not arrive within 0\.2 s"):
            await Fetcher(UrlRules(MEDIA_FLAGS), 10**6, 0.2, look_up).fetch("https://a.example/")
        released.set()

    asyncio.run(run())


def test_connections_to_a_host_are_limited() -> None:
    async def fetch(host: ImageHost) -> list[Any]:
        made = make_fetcher(timeout_s=1.0)
        return await asyncio.gather(*(made.fetch(host.url()) for _ in range(MAX_PER_HOST + 2)), return_exceptions=True)

    errors, host = fetched(lambda target: None, fetch)

    kinds = [type(error) for error in errors]
    assert kinds.count(OverloadedError) == 2
    assert kinds.count(InvalidRequestError) == MAX_PER_HOST
    assert host.most_open == MAX_PER_HOST


def test_those_that_waited_for_a_connection_get_theirs() -> None:
    async def fetch(host: ImageHost) -> list[bytes]:
        made = make_fetcher()
        return await asyncio.gather(*(made.fetch(host.url()) for _ in range(3 * MAX_PER_HOST)))

    files, host = fetched(lambda target: answer(IMAGE), fetch)

    assert files == [IMAGE] * 3 * MAX_PER_HOST
    assert host.most_open <= MAX_PER_HOST
