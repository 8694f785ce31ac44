"""KV in lower tiers that is lost. The server has a tiny model, and a KV pool that holds two long prompts."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmark.models import TINY, save_model
from test.faults.case import Case
from test.faults.cases.processes import send_signal
from test.faults.harness import STREAMING, FaultContext
from test.faults.reactions import STREAMS_CONTINUE

PROMPT_LEN = 1000
KV_TOKENS = 16384
NUM_OTHERS = 20  # prompts that need more than the pool


def worker_flags(base: Path) -> tuple[str, ...]:
    """Write a model below ``base``; returns the flags of a server with it and with tiers."""
    model = base / "model"
    model.mkdir()
    save_model(model, None, TINY)
    return (
        "--model_dir",
        str(model),
        "--load_format",
        "dummy",
        "--deterministic",
        "--max_total_token_num",
        str(KV_TOKENS),
        "--kv_ram_gb",
        "0.25",
        "--kv_disk_gb",
        "0.25",
        "--kv_disk_dir",
        str(base / "kv"),
    )


def _folder(context: FaultContext) -> Path:
    flags = context.running.flags
    return Path(flags[flags.index("--kv_disk_dir") + 1])


def _files(context: FaultContext) -> list[Path]:
    return sorted(_folder(context).rglob("*.kv"))


def _lose_worker(context: FaultContext) -> None:
    """All KV is lost but that on the disk."""
    restarts = context.server.log.count("a new model worker is ready")
    send_signal("ls-worker", signal.SIGKILL)(context)
    context.wait_until(lambda: context.server.log.count("a new model worker is ready") > restarts)


def _text(context: FaultContext, number: int) -> str:
    prompt = [501 + (number * 31 + i * i) % 200 for i in range(PROMPT_LEN)]
    return context.complete_text({"prompt": prompt, "max_tokens": 8, "temperature": 0})


def _evict(context: FaultContext) -> None:
    for number in range(1, NUM_OTHERS):
        _text(context, number)


def lose_host_memory(context: FaultContext) -> None:
    """What was in host memory is computed again by the new worker, with the same text."""
    expected = _text(context, 0)
    _evict(context)
    assert _text(context, 0) == expected
    _lose_worker(context)
    assert _text(context, 0) == expected


def damage_files(context: FaultContext) -> None:
    """Every file has other bytes; the new worker computes what it cannot use."""
    expected = _text(context, 0)
    _evict(context)
    context.wait_until(lambda: len(_files(context)) >= PROMPT_LEN // 64)  # what was evicted: streams run
    _lose_worker(context)
    for number, path in enumerate(_files(context)):
        data = bytearray(path.read_bytes())
        data[number % len(data)] ^= 255
        path.write_bytes(data[: len(data) - number % 2])
    assert _text(context, 0) == expected


def move_folder(context: FaultContext) -> None:
    """The disk vanishes while the server runs."""
    expected = _text(context, 0)
    folder = _folder(context)
    elsewhere = folder.with_name("elsewhere")
    folder.rename(elsewhere)
    context.exits.callback(_move_back, elsewhere, folder)
    _evict(context)
    assert _text(context, 0) == expected


def _move_back(elsewhere: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    elsewhere.rename(folder)


def case(name: str, fault: Callable[[FaultContext], None], restarts: int = 0) -> Case:
    """Most of the time, prompts are computed."""
    options: dict[str, Any] = {"flags": (), "within_s": 60.0, "is_long": True, "restarts": restarts}
    return Case(name, fault, STREAMS_CONTINUE, STREAMING, **options)


CASES = [
    case("kill -9 ls-worker, KV in host memory", lose_host_memory, restarts=1),
    case("files of KV are damaged", damage_files, restarts=1),
    case("the folder of KV vanishes", move_folder),
]
