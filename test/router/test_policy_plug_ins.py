"""Scheduling policies of other packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from lightserve.config.parse import parse_server
from lightserve.errors import ServerError
from lightserve.router import policy
from lightserve.router.policy import PolicyNames, make_policy
from test.api.server import running_server
from test.router.newest_first import NewestFirst

PATH = "test.router.newest_first"


@pytest.fixture
def entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [EntryPoint("newest_first", f"{PATH}:NewestFirst", policy.ENTRY_POINTS)]
    monkeypatch.setattr(policy, "entry_points", lambda group: found if group == policy.ENTRY_POINTS else [])


def test_a_class_is_given_as_module_and_name() -> None:
    assert isinstance(make_policy(f"{PATH}:NewestFirst"), NewestFirst)
    assert parse_server(["--router_policy", f"{PATH}:NewestFirst"]).router.router_policy == f"{PATH}:NewestFirst"


@pytest.mark.usefixtures("entry_point")
def test_a_package_gives_its_class_a_name() -> None:
    assert isinstance(make_policy("newest_first"), NewestFirst)
    assert list(PolicyNames()) == ["fifo", "priority", "cache_aware", "newest_first"]
    assert parse_server(["--router_policy", "newest_first"]).router.router_policy == "newest_first"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("shortest", "choose one of fifo, priority, cache_aware, or a class as module:Class"),
        ("no_such_module:A", "cannot be made: ModuleNotFoundError"),
        (f"{PATH}:Missing", "cannot be made: AttributeError"),
        (f"{PATH}:raises", "cannot be made: RuntimeError: not today"),
        (f"{PATH}:NoPolicy", "is no subclass of lightserve.router.policy.Policy"),
    ],
)
def test_what_is_no_policy_is_one_line(name: str, problem: str) -> None:
    with pytest.raises(ServerError) as caught:
        make_policy(name)

    assert problem in str(caught.value)


@pytest.mark.parametrize("name", ["newest", "a b:C", "a:b.c", ":C", "a:"])
def test_other_names_are_no_value_of_the_flag(name: str) -> None:
    with pytest.raises(SystemExit):
        parse_server(["--router_policy", name])


def test_a_server_admits_by_the_policy(tmp_path: Path) -> None:
    with running_server(tmp_path / "log", "--null_worker", "--router_policy", f"{PATH}:NewestFirst") as server:
        status, _ = server.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 1})

        assert status == 200
        assert "lightserve.newest_first: ranked" in server.log
