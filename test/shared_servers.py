"""Which test files run in one process because their tests share a server of the session: see test/api/conftest.py.

Otherwise each of the processes of ``make test`` would start these servers, which have the default model: some 10 CPU
seconds each, and 0.4 % of a core as long as the tests run.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

FILES = {
    "server": (
        "documented_examples",
        "faults",
        "label_scores",
        "observability",
        "openai_client",
        "other_clients",
        "prefix_cache",
        "special_rules",
        "structured_output",
        "tools",
    ),
    "exact_server": ("beam_search", "parity"),
    "of_one_rank": ("nodes", "pp"),  # what a server answered that has ended
}
SERVER_OF = {f"test/api/test_{name}.py": server for server, names in FILES.items() for name in names}


class SharedServerScheduling(LoadFileScheduling):  # type: ignore[misc]
    """A process gets whole files, and all files that share a server."""

    def _split_scope(self, nodeid: str) -> str:
        path: str = super()._split_scope(nodeid)
        return SERVER_OF.get(path, path)
