"""An HTTP process that dies is replaced, on the same port; one that dies again and again ends the server."""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from lightserve.server.supervisor import MAX_FAILED_RESTARTS
from test.server.launcher_process import LauncherProcess, start_launcher, wait_until

HTTPSERVER = """
    async def main(child_config, launcher):
        with socket.socket(fileno=child_config.listen_fd) as sock:
            port = sock.getsockname()[1]
            note(f"{child_config.index}: process {child_config.http_process} on port {port}")
            if child_config.generation and Path(__file__).with_name("broken").exists():
                raise RuntimeError("no memory is left")
            if child_config.generation and Path(__file__).with_name("slow").exists():
                await asyncio.Event().wait()
            launcher.send(Ready())
            while True:
                message = await launcher.recv()
                note(f"{child_config.index}: {type(message).__name__}")
                if isinstance(message, Drain) and not Path(__file__).with_name("busy").exists():
                    launcher.send(Drained())
    run_child("httpserver", main)
"""
ROUTER = """
    async def main(child_config, launcher):
        await launcher.recv()
        launcher.send(Ready())
        while True:
            note(str(await launcher.recv()))
    run_child("router", main)
"""
DISPATCHER = """
    async def main(child_config, launcher):
        launcher.send(Ready())
        while True:
            note(str(await launcher.recv()))
    run_child("dispatcher", main)
"""
IS_BACK = "a new HTTP process is ready, "


def launcher(folder: Path, *flags: str) -> AbstractContextManager[LauncherProcess]:
    return start_launcher(folder, *flags, httpserver=HTTPSERVER, router=ROUTER, dispatcher=DISPATCHER)


def received(server: LauncherProcess, index: int) -> list[str]:
    """Of the HTTP processes with this index, one after the other."""
    lines = [line.partition(": ") for line in server.received("httpserver")]
    return [text for number, _, text in lines if number == str(index)]


def end(server: LauncherProcess) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0
    assert not server.children()
    assert server.has_cleaned_up()


@pytest.mark.parametrize("count", [1, 2])
def test_an_http_process_that_dies_is_replaced_on_its_port_and_the_router_is_informed(
    tmp_path: Path, count: int
) -> None:
    with launcher(tmp_path, f"--httpserver_workers={count}") as server:
        server.wait_ready()
        before = server.children()
        port = received(server, 0)[0].split()[-1]

        server.signal_child("ls-httpserver", signal.SIGKILL)

        server.wait_for_output(IS_BACK)
        wait_until(lambda: len(received(server, 0)) == 5, "the new one knows the engine")
        assert received(server, 0) == [
            f"process 0 on port {port}",
            "EngineInfo",
            f"process {count} on port {port}",
            "Keys",  # they may have been read again meanwhile
            "EngineInfo",
        ]
        assert server.received("router") == [f"HttpProcessLost(process=0, successor={count})"]
        assert "lightserve: httpserver 0 died (signal 9); restarting it" in server.stderr()
        after = server.children()
        assert sorted(after.values()) == sorted(before.values())
        assert len(set(after) - set(before)) == 1  # no other process was restarted
        end(server)


def test_the_dispatcher_of_several_engines_is_informed(tmp_path: Path) -> None:
    with launcher(tmp_path, "--dp=2") as server:
        server.wait_ready()

        server.signal_child("ls-httpserver", signal.SIGKILL)

        server.wait_for_output(IS_BACK)
        assert server.received("dispatcher")[-1] == "HttpProcessLost(process=0, successor=1)"
        assert not server.received("router")


def test_an_http_process_that_dies_again_and_again_ends_the_server(tmp_path: Path) -> None:
    with launcher(tmp_path, "--httpserver_workers=2") as server:
        server.wait_ready()
        (tmp_path / "broken").touch()

        server.signal_child("ls-httpserver-1", signal.SIGKILL)

        assert server.exit_code() == 1
        assert server.stderr().count("; restarting it") == MAX_FAILED_RESTARTS
        assert "3 new HTTP processes in a row died within 60 s: giving up" in server.stderr()
        assert server.last_line() == "lightserve: httpserver 1 died (exit code 1): RuntimeError: no memory is left"
        assert received(server, 0)[-2:] == ["EngineDied", "Drain"]
        assert not server.children()
        assert server.has_cleaned_up()


def test_deaths_after_the_ready_message_count_too(tmp_path: Path) -> None:
    with launcher(tmp_path) as server:
        server.wait_ready()

        for deaths in range(MAX_FAILED_RESTARTS + 1):
            wait_until(lambda deaths=deaths: server.stderr().count(IS_BACK) == deaths, "it is back")  # type: ignore[misc]
            server.signal_child("ls-httpserver", signal.SIGKILL)

        assert server.exit_code() == 1
        assert server.last_line() == "lightserve: httpserver 0 died (signal 9)"


def test_replacing_may_be_switched_off(tmp_path: Path) -> None:
    with launcher(tmp_path, "--restart_worker=off") as server:
        server.wait_ready()

        server.signal_child("ls-httpserver", signal.SIGKILL)

        assert server.exit_code() == 1
        assert server.last_line() == "lightserve: httpserver 0 died (signal 9)"


def test_an_http_process_that_hangs_is_replaced(tmp_path: Path) -> None:
    with launcher(tmp_path, "--process_timeout=3") as server:
        server.wait_ready()

        server.signal_child("ls-httpserver", signal.SIGSTOP)

        server.wait_for_output(IS_BACK)
        assert (
            "httpserver 0 died (signal 9): it was killed: it did not answer for 3 s; restarting it" in server.stderr()
        )
        end(server)


def test_a_signal_while_an_http_process_is_replaced_ends_the_server(tmp_path: Path) -> None:
    with launcher(tmp_path, "--httpserver_workers=2") as server:
        server.wait_ready()
        (tmp_path / "slow").touch()
        server.signal_child("ls-httpserver", signal.SIGKILL)
        wait_until(lambda: len(received(server, 0)) == 3, "its replacement starts")

        end(server)

        assert received(server, 1)[-1] == "Drain"


def test_an_http_process_that_dies_while_the_server_drains_does_not_delay_it(tmp_path: Path) -> None:
    (tmp_path / "busy").touch()
    with launcher(tmp_path) as server:
        server.wait_ready()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: received(server, 0)[-1] == "Drain", "it drains")

        server.signal_child("ls-httpserver", signal.SIGKILL)

        assert server.exit_code() == 0
        assert "httpserver 0 died (signal 9)" in server.stderr()
        assert not server.children()
        assert server.has_cleaned_up()
