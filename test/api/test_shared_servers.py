from __future__ import annotations

from pathlib import Path

import pytest

from test.shared_servers import FILES, SERVER_OF, SharedServerScheduling

ROOT = Path(__file__).parents[2]


def shared_server_of(item: pytest.Item) -> str | None:
    for name in FILES:
        fixtures = item._fixtureinfo.name2fixturedefs.get(name, ())  # type: ignore[attr-defined]
        if fixtures and fixtures[-1].scope == "session":
            return name
    return None


def test_every_file_with_a_shared_server_is_listed(request: pytest.FixtureRequest) -> None:
    """Of the files that this run has collected."""
    found = {str(item.path.relative_to(ROOT)): shared_server_of(item) for item in request.session.items}

    wrong = {path: name for path, name in found.items() if name is not None and SERVER_OF.get(path) != name}
    assert not wrong
    assert all((ROOT / path).is_file() for path in SERVER_OF)


def test_files_that_share_a_server_are_one_piece_of_work() -> None:
    scope = SharedServerScheduling._split_scope
    scheduling = SharedServerScheduling.__new__(SharedServerScheduling)

    assert scope(scheduling, "test/api/test_tools.py::test_a[b::c]") == scope(scheduling, "test/api/test_faults.py::d")
    assert scope(scheduling, "test/api/test_parity.py::test_a") == "exact_server"
    assert scope(scheduling, "test/api/test_tp.py::test_a") == "test/api/test_tp.py"
