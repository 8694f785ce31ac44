"""What the operator sees of the launcher."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence

from lightserve.io_struct import EngineReady, Phase
from lightserve.server.checks import ModelFacts


def say(what: object) -> None:
    show(f"lightserve: {what}")


def show(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a full disk or a closed pipe is no reason to stop serving
        print(text, file=sys.stderr, flush=True)


def banner(
    url: str, model: ModelFacts, engine: EngineReady, http_processes: int, phases: Mapping[str, Sequence[Phase]]
) -> str:
    """That the server is ready; ``phases`` are the parts of each process's start."""
    rows = {
        "model": model.name,
        "computed as": " ".join((model.architecture, engine.computed_in)),
        "longest request": f"{engine.max_req_total_len:,} tokens",
        "KV pool": f"{engine.max_total_token_num:,} tokens",
        "HTTP processes": str(http_processes),
    }
    for role, parts in phases.items():
        if parts:
            rows[role] = ", ".join(f"{part.name} {part.seconds:.2f} s" for part in parts)
    width = max(map(len, rows))
    return "\n".join([f"LightServe is ready at {url}", *(f"  {name:{width}}  {text}" for name, text in rows.items())])
