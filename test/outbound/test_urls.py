from __future__ import annotations

import pytest

from lightserve.errors import InvalidRequestError
from lightserve.media.fetch.fetcher import MEDIA_FLAGS
from lightserve.outbound.urls import OutboundUrl, UrlRules, parse_url, redirected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://a.example/cat.png", OutboundUrl("https", "a.example", 443, "/cat.png")),
        ("HTTPS://A.Example", OutboundUrl("https", "a.example", 443, "/")),
        ("http://a.example?x=1#part", OutboundUrl("http", "a.example", 80, "/?x=1")),
        ("https://a.example:8443/a%20b?u=https://b@c", OutboundUrl("https", "a.example", 8443, "/a%20b?u=https://b@c")),
        ("https://a.example/kätzchen.png", OutboundUrl("https", "a.example", 443, "/k%C3%A4tzchen.png")),
        ("https://[2001:DB8::1]/", OutboundUrl("https", "2001:db8::1", 443, "/")),
        ("https://8.8.8.8/", OutboundUrl("https", "8.8.8.8", 443, "/")),
    ],
)
def test_urls_are_read(text: str, expected: OutboundUrl) -> None:
    assert parse_url(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "https://",
        "https:///cat.png",
        "https:/a.example",
        "https://user@a.example/",
        "https://a.example\\@127.0.0.1/",
        "https://a.example\\.b.example/",
        "https://a.example/\\..",
        "https://a.example/ b",
        "https://a.example/\r\nHost: b",
        "https://a.example\n",
        "https://a.example\x00/",
        "https://a.example%2eb/",
        "https://a.example#@127.0.0.1/ b",
        "https://a..example/",
        "https://.a.example/",
        "https://a.example./",
        "https://-a.example/",
        "https://kätzchen.example/",
        "https://127.0.0.1。/",
        "https://2130706433/",
        "https://0x7f000001/",
        "https://0x7f.1/",
        "https://127.1/",
        "https://0177.0.0.1/",
        "https://127.0.0.1.256/",
        "https://[::1%25eth0]/",
        "https://[1]/",
        "https://a.example:0/",
        "https://a.example:65536/",
        "https://a.example:1x/",
        "ftp://a.example/",
        "https://a.example/" + "a" * 9000,
    ],
)
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse_url(text)


BASE = parse_url("https://a.example:8443/b/c.png?x=1")


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("http://b.example/d", "http://b.example/d"),
        ("//b.example/d", "https://b.example/d"),
        ("/d?y=2", "https://a.example:8443/d?y=2"),
        ("?y=2", "https://a.example:8443/b/c.png?y=2"),
        ("d", "https://a.example:8443/b/d"),
    ],
)
def test_redirects_lead_where_they_say(location: str, expected: str) -> None:
    assert redirected(BASE, location) == parse_url(expected)


@pytest.mark.parametrize("location", ["file:///etc/passwd", "gopher://b.example/", "//b.example\\@c.example/", "a b"])
def test_redirects_to_something_else_are_refused(location: str) -> None:
    with pytest.raises(InvalidRequestError):
        redirected(BASE, location)


def refusal(rules: UrlRules, url: str) -> str:
    try:
        rules.check(parse_url(url))
    except InvalidRequestError as error:
        return str(error)
    return ""


def test_rules_of_the_operator() -> None:
    usual, listed = UrlRules(MEDIA_FLAGS), UrlRules(MEDIA_FLAGS, allowed_domains=("A.example", "*.b.example"))

    assert refusal(usual, "https://c.example/") == ""
    assert "--allow_http_media" in refusal(usual, "http://c.example/")
    assert refusal(UrlRules(MEDIA_FLAGS, allows_http=True), "http://c.example/") == ""
    assert "has port 22; only 443" in refusal(usual, "https://c.example:22/")
    assert "has port 443; only 80" in refusal(UrlRules(MEDIA_FLAGS, allows_http=True), "http://c.example:443/")
    assert refusal(listed, "https://a.example:8443/") == ""
    assert refusal(listed, "https://x.b.example/") == ""
    for host in ("c.example", "xa.example", "b.example", "xb.example", "a.example.c.example"):
        assert "--allowed_media_domains" in refusal(listed, f"https://{host}/"), host
    assert refusal(UrlRules(MEDIA_FLAGS, ("a.example",), ("cdn",)), "https://cdn:8443/") == ""
