"""A mixed load: every kind of client gets the response that it must get."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from benchmark.serving import soak
from benchmark.serving.soak_requests import KINDS


@pytest.mark.long
def test_a_minute_of_mixed_load_passes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # a minute is a warm-up: it takes longer to see whether memory stays flat
    monkeypatch.setattr(soak, "SLACK_MIB", 200.0)
    monkeypatch.setattr("sys.argv", ["soak", "--minutes", "1", "--clients", "8"])

    code = soak.main()

    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "passed: nothing is wrong" in printed
    assert "ls-worker RSS MiB" in printed


def test_what_has_grown_is_reported() -> None:
    before = {"kv_used_tokens": 0.0, "ls-router RSS MiB": 30.0, "ls-router threads": 7.0}
    fine = {"kv_used_tokens": 0.0, "ls-router RSS MiB": 30.0 + soak.SLACK_MIB, "ls-router threads": 6.0}
    grown = {"kv_used_tokens": 5.0, "ls-router RSS MiB": 40.0 + soak.SLACK_MIB, "ls-router threads": 8.0}

    assert not list(soak.grown(before, fine, requests=1000))
    assert len(list(soak.grown(before, grown, requests=1000))) == 3


def test_every_kind_makes_requests_and_knows_how_they_end() -> None:
    paths = Counter(kind.make(Random(seed))[0] for kind in KINDS for seed in range(20))

    assert {"/v1/messages", "/v1/responses", "/generate", "/generate_stream", "/tokenize"} <= set(paths)
    for kind in KINDS:
        assert not kind.is_expected_end(500, b"")
        assert kind.is_expected_end(kind.statuses[0], kind.end)
