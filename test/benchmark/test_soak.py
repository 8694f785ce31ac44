"""Mixed use for a while: every kind of client is treated as it must be."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from lightserve.benchmark import soak
from lightserve.benchmark.soak_requests import KINDS


@pytest.mark.long
def test_a_minute_of_everything(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        soak, "SLACK_MIB", 200.0
    )  # a minute is a warm-up: whether memory stays flat takes longer to tell
    monkeypatch.setattr("sys.argv", ["soak", "--minutes", "1", "--clients", "8"])

    code = soak.main()

    said = capsys.readouterr().out
    assert code == 0, said
    assert "all as it must be" in said
    assert "ls-worker RSS MiB" in said


def test_what_has_grown_is_told() -> None:
    before = {"kv_used_tokens": 0.0, "ls-router RSS MiB": 30.0, "ls-router threads": 7.0}
    fine = {"kv_used_tokens": 0.0, "ls-router RSS MiB": 30.0 + soak.SLACK_MIB, "ls-router threads": 6.0}
    grown = {"kv_used_tokens": 5.0, "ls-router RSS MiB": 40.0 + soak.SLACK_MIB, "ls-router threads": 8.0}

    assert not list(soak.grown(before, fine, requests=1000))
    assert len(list(soak.grown(before, grown, requests=1000))) == 3


def test_every_kind_makes_requests_and_knows_how_they_end() -> None:
    paths = Counter(kind.make(Random(seed))[0] for kind in KINDS for seed in range(20))

    assert {"/v1/messages", "/v1/responses", "/generate", "/generate_stream", "/tokenize"} <= set(paths)
    for kind in KINDS:
        assert not kind.is_well_ended(500, b"")
        assert kind.is_well_ended(kind.statuses[0], kind.end)
