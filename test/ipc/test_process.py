"""A child of the launcher; the test plays the launcher."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from lightserve.config import ClusterConfig, HttpConfig, LaunchConfig, RouterConfig, ServerConfig, WorkerConfig
from lightserve.ipc.child_setup import process_name
from lightserve.ipc.process import ChildConfig
from lightserve.messages.control import ChildFailed, Drain, Drained, EngineDied, FromChild, Ready, StartupPhase, ToChild

ROOT = Path(__file__).parent.parent.parent
CONFIG = ServerConfig(
    worker=WorkerConfig(tp=2), router=RouterConfig(eos_id=[7]), http=HttpConfig(api_key=["k"]), launch=LaunchConfig()
)
DEADLINE_S = 120.0  # far longer than any test needs, even on a loaded machine
PRELUDE = """
import asyncio, signal, sys
from lightserve.errors import ModelFilesError
from lightserve.messages.control import Drained, ChildFailed, StartupPhase, Ready
from lightserve.ipc.process import run_child
"""


class Launcher:
    """The launcher's end of the control socket of a child that runs ``source``."""

    def __init__(self, source: str) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(DEADLINE_S)
        self._file = self._control.makefile("rb")
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PRELUDE + textwrap.dedent(source), str(theirs.fileno())],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

    def send_config(self, index: int = 0, dp: int = 1, engine: int = 0) -> None:
        config = replace(CONFIG, cluster=ClusterConfig(dp=dp))
        self._write(ChildConfig(config, "/tmp/run", index, listen_fd=None, engine=engine))

    def send(self, message: ToChild) -> None:
        self._write(message)

    def recv(self) -> FromChild:
        message: FromChild = msgspec.json.decode(self._file.readline(), type=FromChild)
        return message

    def close(self) -> None:
        self._file.close()
        self._control.close()

    def wait(self) -> tuple[int, str]:
        """Exit code and stderr of a child that exits by itself."""
        _, stderr = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, stderr

    def _write(self, message: ChildConfig | ToChild) -> None:
        self._control.sendall(msgspec.json.encode(message) + b"\n")


@pytest.fixture
def launch() -> Iterator[Callable[[str], Launcher]]:
    launched: list[Launcher] = []

    def launch(source: str) -> Launcher:
        launched.append(Launcher(source))
        return launched[-1]

    yield launch
    for launcher in launched:
        launcher.process.kill()
        launcher.process.communicate()
        launcher.close()


Launch = Callable[[str], Launcher]


def test_a_child_gets_the_whole_config_and_its_index(launch: Launch) -> None:
    launcher = launch("""
        async def main(child_config, launcher):
            worker, router, http = child_config.config.worker, child_config.config.router, child_config.config.http
            launcher.send(StartupPhase(f"{worker.tp} {router.eos_id} {http.api_key} {child_config.index}", 1.0))
            launcher.send(StartupPhase(f"{child_config.address('router')} {child_config.path('worker-0')}", 2.0))
        run_child("router", main)
    """)

    launcher.send_config(index=3)

    assert launcher.recv() == StartupPhase("2 [7] ['k'] 3", 1.0)
    assert launcher.recv() == StartupPhase("ipc:///tmp/run/router /tmp/run/worker-0", 2.0)


LOGS = """
        from lightserve.utils.logger import init_logger, set_log_format
        def main(child_config, launcher):
            set_log_format(LOG_FORMAT)
            init_logger("lightserve.x").info("%d of %d", 1, 2)
        run_child(ROLE, main)
"""


@pytest.mark.parametrize("role", ["router", "model worker", "null worker"])
def test_lines_of_several_engines_say_which_engine_they_are_from(launch: Launch, role: str) -> None:
    as_text = launch(LOGS.replace("LOG_FORMAT", "'text'").replace("ROLE", repr(role)))
    as_json = launch(LOGS.replace("LOG_FORMAT", "'json'").replace("ROLE", repr(role)))
    for launcher in (as_text, as_json):
        launcher.send_config(dp=2, engine=1)

    assert as_text.wait()[1].endswith(" INFO lightserve.x: engine 1: 1 of 2\n")
    line = json.loads(as_json.wait()[1])
    assert (line["message"], line["engine"]) == ("1 of 2", 1)


@pytest.mark.parametrize(("role", "dp"), [("router", 1), ("httpserver", 2), ("dispatcher", 2)])
def test_lines_that_are_of_no_engine_in_particular_name_none(launch: Launch, role: str, dp: int) -> None:
    launcher = launch(LOGS.replace("LOG_FORMAT", "'text'").replace("ROLE", repr(role)))

    launcher.send_config(dp=dp)

    assert launcher.wait()[1].endswith(" INFO lightserve.x: 1 of 2\n")


def test_messages_wait_for_a_busy_loop_and_keep_their_order(launch: Launch) -> None:
    launcher = launch("""
        async def main(child_config, launcher):
            launcher.send(Ready())
            sys.stdin.readline()  # blocks the loop
            for _ in range(2):
                launcher.send(StartupPhase(repr(await launcher.recv()), 0.0))
        run_child("httpserver", main)
    """)
    launcher.send_config()
    assert launcher.recv() == Ready()

    launcher.send(Drain())
    launcher.send(EngineDied("x"))
    launcher.process.communicate("go on\n", timeout=DEADLINE_S)

    assert launcher.recv() == StartupPhase("Drain()", 0.0)
    assert launcher.recv() == StartupPhase("EngineDied(message='x')", 0.0)


@pytest.mark.parametrize(
    "busy",
    [
        "signal.pause()",
        "while True: pass",  # the interpreter never idles
    ],
)
@pytest.mark.parametrize("kind", ["async def", "def"])
def test_a_child_exits_when_the_launcher_closes_the_control_socket(launch: Launch, kind: str, busy: str) -> None:
    launcher = launch(f"""
        {kind} main(child_config, launcher):
            launcher.send(Ready())
            {busy}
        run_child("model worker", main)
    """)
    launcher.send_config()
    assert launcher.recv() == Ready()

    launcher.close()

    assert launcher.wait() == (1, "")


def test_a_child_exits_when_the_launcher_exits_before_the_first_message(launch: Launch) -> None:
    launcher = launch('run_child("router", None)')

    launcher.close()

    assert launcher.wait() == (1, "")


def test_a_child_ignores_stop_signals(launch: Launch) -> None:
    launcher = launch("""
        async def main(child_config, launcher):
            launcher.send(Ready())
            await launcher.recv()
            launcher.send(Drained())
        run_child("router", main)
    """)
    launcher.send_config()
    assert launcher.recv() == Ready()

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        launcher.process.send_signal(signum)
    launcher.send(Drain())

    assert launcher.recv() == Drained()
    assert launcher.wait() == (0, "")


def test_a_configuration_error_is_reported_without_a_traceback(launch: Launch) -> None:
    launcher = launch("""
        def main(child_config, launcher):
            raise ModelFilesError("config.json: broken;\\n  fetch it again")
        run_child("model worker", main)
    """)

    launcher.send_config()

    assert launcher.recv() == ChildFailed("config.json: broken; fetch it again (see docs/model_files.md)")
    assert launcher.wait() == (2, "")


def test_a_crash_is_reported_with_a_traceback(launch: Launch) -> None:
    launcher = launch("""
        async def fail():
            raise ZeroDivisionError("by zero")
        async def main(child_config, launcher):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fail())
                await launcher.recv()
        run_child("router", main)
    """)

    launcher.send_config()

    assert launcher.recv() == ChildFailed("ZeroDivisionError: by zero")
    code, stderr = launcher.wait()
    assert code == 1
    assert "in fail" in stderr


def test_running_threads_do_not_keep_a_finished_child_alive(launch: Launch) -> None:
    launcher = launch("""
        import threading
        def main(child_config, launcher):
            threading.Thread(target=signal.pause).start()
        run_child("model worker", main)
    """)

    launcher.send_config()

    assert launcher.wait() == (0, "")


def test_a_child_started_by_hand_prints_the_right_command() -> None:
    program = PRELUDE + 'run_child("router", None)'

    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)

    assert run.returncode == 1
    assert run.stderr.splitlines() == [
        "this module is one process of the server; start the server with: python -m lightserve.server.api_server"
    ]


@pytest.mark.parametrize(
    ("role", "index", "name"),
    [("router", 0, "ls-router"), ("model worker", 1, "ls-worker-1"), ("httpserver", 12, "ls-httpserve-12")],
)
def test_process_names_fit_the_kernels_limit(role: str, index: int, name: str) -> None:
    assert process_name(role, index) == name
    assert len(name) <= 15


def test_ps_shows_the_process_name(launch: Launch) -> None:
    launcher = launch("""
        def main(child_config, launcher):
            launcher.send(Ready())
            signal.pause()
        run_child("model worker", main)
    """)
    launcher.send_config(index=1)
    assert launcher.recv() == Ready()

    assert Path(f"/proc/{launcher.process.pid}/comm").read_text() == "ls-worker-1\n"


@pytest.mark.parametrize("count", [1, 3, 64])
def test_http_processes_and_their_replacements_have_different_numbers(count: int) -> None:
    config = replace(CONFIG, http=HttpConfig(httpserver_workers=count))
    places = [(generation, index) for generation in range(4) for index in range(count)]

    numbers = [ChildConfig(config, "", index, generation=generation).http_process for generation, index in places]

    assert sorted(numbers) == list(range(4 * count))
    assert [number % count for number in numbers] == [index for _, index in places]
    assert ChildConfig(config, "", generation=1_000_000).http_process < 256
