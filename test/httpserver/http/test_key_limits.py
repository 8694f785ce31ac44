from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from lightserve.errors import KeyLimitError
from lightserve.httpserver.http import key_usage
from lightserve.httpserver.http.key_limits import KeyLimiter, KeyLimits
from lightserve.httpserver.http.key_usage import Column, KeyUsage
from lightserve.utils.key_spec import KeySpec, parse_key

KEY = KeySpec("secret")
DIGEST = KEY.digest


class Clock:
    def __init__(self) -> None:
        self.now_s = 60_000.0

    def __call__(self) -> int:
        return int(self.now_s * 1e9)


def limiter(clock: Clock, limits: KeyLimits, *specs: KeySpec) -> KeyLimiter:
    made = KeyLimiter(limits, KeyUsage(now_ns=clock))
    made.use(specs or (KEY,))
    return made


def send(limited: KeyLimiter, digest: bytes = DIGEST) -> int | None:
    """None: it was admitted, and has ended; else the seconds of Retry-After."""
    try:
        with limited.counted(digest, "/v1/completions"):
            return None
    except KeyLimitError as error:
        return error.retry_after_s


def test_requests_beyond_the_rate_are_told_when_to_come_back() -> None:
    clock = Clock()
    limited = limiter(clock, KeyLimits(requests_per_minute=3))

    assert [send(limited) for _ in range(3)] == [None, None, None]
    wait_s = send(limited)

    assert wait_s is not None
    clock.now_s += wait_s - 1.5
    assert send(limited) is not None
    clock.now_s += 1.5
    assert send(limited) is None


@pytest.mark.parametrize("limit", [1, 2, 7, 60, 1200])
def test_requests_come_back_evenly(limit: int) -> None:
    clock = Clock()
    limited = limiter(clock, KeyLimits(requests_per_minute=limit))
    times = []
    for _ in range(6_000):
        clock.now_s += 0.05
        if send(limited) is None:
            times.append(clock.now_s)

    first_minute = sum(at < clock.now_s - 240 for at in times)
    assert first_minute <= 2 * limit
    assert 0.9 * limit * 4 - 1 <= len(times) - first_minute <= limit * 4 + 1


def test_who_waits_as_long_as_told_is_admitted() -> None:
    clock = Clock()
    limited = limiter(clock, KeyLimits(requests_per_minute=5))
    for _ in range(200):
        clock.now_s += 1.7
        wait_s = send(limited)
        if wait_s is not None:
            clock.now_s += wait_s
            assert send(limited) is None


def test_requests_at_once_are_limited() -> None:
    limited = limiter(Clock(), KeyLimits(concurrency=2))

    with limited.counted(DIGEST, "/generate"), limited.counted(DIGEST, "/generate"):
        with (
            pytest.raises(KeyLimitError, match=r"2 requests of this API key are running; its limit is 2 \(--key_conc"),
            limited.counted(DIGEST, "/generate"),
        ):
            pass
        with limited.counted(DIGEST, "/v1/responses/resp_1/cancel"):
            pass  # it ends one of them

    assert send(limited) is None
    assert limited.totals(None)[KEY.label][Column.REFUSED_CONCURRENCY] == 1


def test_a_key_has_its_own_limits_and_others_are_not_affected() -> None:
    tight, usual = parse_key("a name=tight requests_per_minute=1"), parse_key("b")
    limited = limiter(Clock(), KeyLimits(requests_per_minute=2), tight, usual)

    assert [send(limited, tight.digest) is None for _ in range(3)] == [True, False, False]
    assert [send(limited, usual.digest) is None for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("limit", ["requests_per_minute=1", "concurrency=1"])
def test_a_limit_of_a_key_alone_names_no_flag(limit: str) -> None:
    own = parse_key(f"a {limit}")
    limited = limiter(Clock(), KeyLimits(2, 2), own)

    with limited.counted(own.digest, "/x"), pytest.raises(KeyLimitError) as caught, limited.counted(own.digest, "/x"):
        pass

    assert "limit" in str(caught.value)
    assert "--key_" not in str(caught.value)


def test_all_processes_count_together_and_a_dead_one_runs_nothing(tmp_path: Path) -> None:
    clock = Clock()
    usages = [KeyUsage(str(tmp_path), process, 2, clock) for process in range(2)]
    limiters = [KeyLimiter(KeyLimits(3, 2), usage) for usage in usages]
    for limited in limiters:
        limited.use([KEY])

    with limiters[0].counted(DIGEST, "/x"), limiters[1].counted(DIGEST, "/x"):
        assert send(limiters[1]) == 1  # two are running
    assert [send(limiters[1]), send(limiters[0]) is None] == [None, False]

    usages[0].add(DIGEST, Column.RUNNING, 2)
    KeyUsage(str(tmp_path), 0, 2, clock)  # takes the place of the process that died
    assert usages[1].total(DIGEST, Column.RUNNING) == 0
    assert usages[1].total(DIGEST, Column.REQUESTS) == 3


def test_tokens_are_counted_by_the_name_of_the_key_and_seen_by_their_owner() -> None:
    specs = [parse_key("a name=team"), parse_key("b name=team"), parse_key("c")]
    limited = limiter(Clock(), KeyLimits(), *specs)
    for spec in specs:
        limited.count_tokens(spec.digest.hex(), 10, 2)
    limited.count_tokens("", 5, 5)
    limited.count_tokens(hashlib.sha256(b"boss").hexdigest(), 5, 5)

    everything, own = limited.totals(None), limited.totals(specs[0].digest.hex())

    assert {name: row[Column.PROMPT_TOKENS] for name, row in everything.items()} == {"team": 20, specs[2].label: 10}
    assert {name: row[Column.OUTPUT_TOKENS] for name, row in own.items()} == {"team": 2}
    assert specs[2].label.startswith("key-")


def test_more_keys_than_rows_share_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_usage, "KEYS", 4)
    usage = KeyUsage()
    digests = [KeySpec(str(number)).digest for number in range(8)]
    for digest in digests:
        usage.count_request(digest)

    assert all(usage.total(digest, Column.REQUESTS) >= 1 for digest in digests)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("sk-1", KeySpec("sk-1")),
        ("two words", KeySpec("two words")),
        ("sk=1 x=2", KeySpec("sk=1 x=2")),
        ("sk-1  name=search concurrency=8", KeySpec("sk-1", "search", None, 8)),
        ("sk-1 requests_per_minute=60", KeySpec("sk-1", None, 60)),
    ],
)
def test_lines_of_a_key_file(text: str, spec: KeySpec) -> None:
    assert parse_key(text) == spec


@pytest.mark.parametrize(
    "text",
    [
        "secret concurrency=0",
        "secret concurrency=many",
        "secret name=a name=b",
        "secret name=",
        "secret name=a rpm=3",
        "secret name=a b",
        "secret nam=a",
        "secret request_per_minute=3",
    ],
)
def test_wrong_lines_are_refused_without_showing_the_key(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be|after a key come") as caught:
        parse_key(text)

    assert "secret" not in str(caught.value)
