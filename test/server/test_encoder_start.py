"""On a GPU the workers load beside the encoder, and measure the memory that is left when it has its own."""

from __future__ import annotations

import asyncio
import os
import select
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightserve.config.parse import parse_server
from lightserve.ipc.process import ChildConfig
from lightserve.server import engine_processes
from lightserve.server.engine_processes import EngineProcesses
from lightserve.server.images import has_own_memory
from lightserve.utils import drivers


class Started:
    """In place of the launcher: it keeps what each process would inherit."""

    encoder_module = worker_module = "none"
    show_progress = None

    def __init__(self) -> None:
        self.pipes: dict[str, int] = {}

    async def start_child(self, role: str, module: str, config: ChildConfig, env: object = None) -> Any:
        if config.encoder_fd is not None:
            assert config.encoder_fd in config.fds
            self.pipes[role] = os.dup(config.encoder_fd)
        return SimpleNamespace(show_progress=None)

    def is_open(self, role: str) -> bool:
        readable, _, _ = select.select([self.pipes[role]], [], [], 0)
        return not readable


def start(folder: str, started: Started) -> EngineProcesses:
    config = parse_server(["--model_dir", folder, "--tp", "2", "--embed_cache_gb", "0.01"])
    engine = EngineProcesses(started, config, "/nowhere")  # type: ignore[arg-type]
    engine.open_arena()
    asyncio.run(engine.start_first_encoders())
    asyncio.run(engine.start_workers())
    return engine


def test_workers_wait_until_the_encoder_has_its_memory(small_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_processes, "has_own_memory", lambda device: True)
    started = Started()
    start(small_folder, started)

    assert started.is_open("model worker 0")
    assert started.is_open("model worker 1")
    os.close(started.pipes.pop("encoder"))
    assert not started.is_open("model worker 0")
    assert not started.is_open("model worker 1")


def test_no_worker_waits_for_an_encoder_on_a_cpu(small_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_processes, "has_own_memory", lambda device: False)
    started = Started()
    start(small_folder, started)

    assert started.pipes == {}


def test_a_new_worker_does_not_wait_for_a_new_encoder(small_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_processes, "has_own_memory", lambda device: True)
    started = Started()
    engine = start(small_folder, started)
    os.close(started.pipes.pop("encoder"))

    asyncio.run(engine.start_workers())

    assert not started.is_open("model worker 0")


@pytest.mark.parametrize(("device", "expected"), [("npu", True), ("rocm", True), ("cuda", False), ("cpu", False)])
def test_a_device_of_another_package_has_its_own_memory(
    device: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(drivers.DRIVERS, "rocm", drivers.DRIVERS["rocm"]._replace(control=tmp_path))
    monkeypatch.setitem(drivers.DRIVERS, "cuda", drivers.DRIVERS["cuda"]._replace(control=tmp_path / "absent"))

    assert has_own_memory(device) == expected
