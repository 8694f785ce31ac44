"""What the launcher prints for the operator."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence

from lightserve.config import HttpConfig
from lightserve.io_struct import EngineReady, StartupPhase
from lightserve.server.checks import ModelInfo


def print_line(message: object) -> None:
    print_text(f"lightserve: {message}")


def print_text(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a full disk or a closed pipe must not stop the server
        print(text, file=sys.stderr, flush=True)


def banner(
    url: str, model: ModelInfo, engine: EngineReady, http: HttpConfig, phases: Mapping[str, Sequence[StartupPhase]]
) -> str:
    """The text for a server that is ready. ``phases`` are the start-up times of each process."""
    rows = {} if http.no_web else {"chat page": f"{url}/"}
    rows |= {
        "model": model.name,
        "computed as": " ".join((model.architecture, engine.dtype_and_device)),
        "longest request": f"{engine.max_req_total_len:,} tokens",
        "KV pool": f"{engine.max_total_token_num:,} tokens",
        "HTTP processes": str(http.num_processes),
    }
    if engine.windowed is not None:
        rows["KV pool"] += f"; {engine.windowed.size:,} in layers with a window of {engine.windowed.window:,} tokens"
    if model.sampling_defaults:
        rows["sampling defaults"] = f"{model.sampling_defaults} (of the model; --generation_config none ignores them)"
    for role, parts in phases.items():
        if parts:
            rows[role] = ", ".join(f"{part.name} {part.seconds:.2f} s" for part in parts)
    width = max(map(len, rows))
    return "\n".join([f"LightServe is ready at {url}", *(f"  {name:{width}}  {text}" for name, text in rows.items())])
