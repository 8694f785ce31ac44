"""A real launcher whose child processes are small scripts, so that no test needs a model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 120.0  # far longer than any test needs, even on a loaded machine
DRAIN_TIMEOUT_S = 600  # far longer than DEADLINE_S: a test fails if the server waits for it

PRELUDE = """
import asyncio, os, signal, socket, subprocess, sys
from pathlib import Path
from lightserve.errors import ModelFilesError
from lightserve.messages.control import *
from lightserve.ipc.process import run_child

def note(text):
    with Path(__file__).with_suffix(".received").open("a") as file:
        file.write(text + chr(10))
"""
WORKER = """
    def main(child_config, launcher):
        launcher.send(StartupPhase("weights", 0.25))
        figures = dict(max_total_token_num=4096, max_req_total_len=512, vocab_size=64, pipeline_depth=1)
        launcher.send(EngineInfo(**figures, dtype_and_device="in float16 on a fake"))
        signal.pause()
    run_child("model worker", main)
"""
ROUTER = """
    async def main(child_config, launcher):
        note(type(await launcher.recv()).__name__)
        launcher.send(Ready())
        await asyncio.Event().wait()
    run_child("router", main)
"""
DETOKENIZER = """
    async def main(child_config, launcher):
        launcher.send(Ready())
        await asyncio.Event().wait()
    run_child("detokenizer", main)
"""
DISPATCHER = """
    async def main(child_config, launcher):
        launcher.send(Ready())
        while True:
            message = await launcher.recv()
            note(f"{type(message).__name__} {message.engine}")
    run_child("dispatcher", main)
"""
ENCODER = """
    async def main(child_config, launcher):
        launcher.send(Ready())
        await asyncio.Event().wait()
    run_child("encoder", main)
"""
HTTPSERVER = """
    async def main(child_config, launcher):
        with socket.socket(fileno=child_config.listen_fd) as sock:
            note(f"port {sock.getsockname()[1]}")
            launcher.send(Ready())
            while True:
                message = await launcher.recv()
                note(type(message).__name__)
                if isinstance(message, Drain):
                    launcher.send(Drained())
    run_child("httpserver", main)
"""
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}
PROGRAM = """
import sys
from lightserve.server.api_server import main
from lightserve.server.process_group import Modules
roles = ("worker", "router", "detokenizer", "httpserver", "dispatcher", "encoder")
sys.exit(main(modules=Modules(**{role: f"fake_{role}" for role in roles})))
"""


def tiny_model(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    return folder


def wait_until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"waited {DEADLINE_S} s until {what}"
        time.sleep(0.02)


class LauncherProcess:
    def __init__(self, folder: Path, run_base: Path, flags: tuple[str, ...]) -> None:
        self.folder = folder
        self.run_base = run_base
        self._stderr = folder / "stderr"
        model = tiny_model(folder)
        with self._stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    PROGRAM,
                    *(
                        f"--drain_timeout={DRAIN_TIMEOUT_S}",
                        "--port=0",
                        f"--model_dir={model}",
                        "--load_format=dummy",
                        *flags,
                    ),
                ],
                cwd=ROOT,
                stderr=stderr,
                env={**os.environ, "PYTHONPATH": str(folder), "TMPDIR": str(run_base)},
            )

    def children(self) -> dict[int, str]:
        """Pid and name of every running process that this launcher started, including orphans."""
        mark = f"PYTHONPATH={self.folder}".encode()
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # another user's, or it has just exited
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found[int(process.name)] = (process / "comm").read_text().strip()
        found.pop(self.process.pid, None)
        return found

    def signal_child(self, name: str, signum: signal.Signals) -> None:
        (pid,) = (pid for pid, child_name in self.children().items() if child_name == name)
        os.kill(pid, signum)

    def stderr(self) -> str:
        return self._stderr.read_text()

    def last_line(self) -> str:
        return self.stderr().splitlines()[-1]

    def received(self, role: str) -> list[str]:
        path = self.folder / f"fake_{role}.received"
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def wait_for_output(self, text: str) -> None:
        wait_until(lambda: text in self.stderr() or self.process.poll() is not None, f"it prints {text!r}")
        assert text in self.stderr()

    def wait_ready(self) -> None:
        self.wait_for_output("is ready at")
        self.wait_for_output(", total ")

    def exit_code(self) -> int:
        return self.process.wait(DEADLINE_S)

    def has_cleaned_up(self) -> bool:
        return not list(self.run_base.iterdir())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pid in self.children():
            os.kill(pid, signal.SIGKILL)


def write_children(folder: Path, **sources: str) -> None:
    roles = {"worker": WORKER, "router": ROUTER, "detokenizer": DETOKENIZER, "httpserver": HTTPSERVER}
    roles |= {"dispatcher": DISPATCHER, "encoder": ENCODER} | sources
    for role, source in roles.items():
        (folder / f"fake_{role}.py").write_text(PRELUDE + textwrap.dedent(source))


@contextlib.contextmanager
def start_launcher(folder: Path, *flags: str, **sources: str) -> Iterator[LauncherProcess]:
    """Start a launcher with well-behaved children. ``sources`` replace the scripts of some roles."""
    write_children(folder, **sources)
    with tempfile.TemporaryDirectory(prefix="ls-test-", dir="/tmp") as run_base:
        server = LauncherProcess(folder, Path(run_base), flags)
        try:
            yield server
        finally:
            server.kill()
