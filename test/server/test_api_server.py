"""The lifecycle of the server's processes: start, ready, death, signals, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightserve.config import ClusterConfig
from lightserve.server.banner import print_line
from lightserve.server.child_process import ChildDiedError
from lightserve.server.process_group import Modules, ProcessGroup
from test.server.launcher_process import DRAIN_TIMEOUT_S, WORKER, start_launcher, wait_until

SLOW_TO_LOAD = """
    def main(child_config, launcher):
        launcher.send(StartupPhase("import torch", 1.0))
        note("loading")
        signal.pause()
    run_child("model worker", main)
"""
BUSY_HTTPSERVER = """
    async def main(child_config, launcher):
        launcher.send(Ready())
        while True:
            message = await launcher.recv()
            note(type(message).__name__)
            if isinstance(message, EngineDied) or Path(__file__).with_name("finish").exists():
                launcher.send(Drained())
    run_child("httpserver", main)
"""


def test_all_processes_become_ready_in_order_and_the_banner_is_printed(tmp_path: Path) -> None:
    with start_launcher(tmp_path, "--httpserver_workers=2", "--tp=2", "--dtype=float16") as server:
        server.wait_ready()

        (run_dir,) = server.run_base.iterdir()
        assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
        output = " ".join(server.stderr().split())
        port = server.received("httpserver")[0].split()[1]
        url = f"http://127.0.0.1:{port}"
        assert f"LightServe is ready at {url} chat page {url}/ model {tmp_path.name} " in output
        assert "computed as LlamaForCausalLM in float16 on a fake longest request 512 tokens KV pool" in output
        assert "HTTP processes 2 " in output
        assert "model worker 1 weights 0.25 s" in output
        assert "has no tokenizer: prompts must be token ids" in output
        assert server.received("router") == ["EngineInfo"]
        wait_until(lambda: server.received("httpserver").count("EngineInfo") == 2, "both HTTP processes get the limits")
        assert server.received("httpserver").count(f"port {port}") == 2
        assert sorted(server.children().values()) == [
            "ls-detokenizer",
            "ls-httpserver",
            "ls-httpserver-1",
            "ls-router",
            "ls-worker",
            "ls-worker-1",
        ]


ROUTER_WITH_EOS_TOKENS = """
    async def main(child_config, launcher):
        note(str((await launcher.recv()).eos_token_ids))
        launcher.send(Ready())
        await asyncio.Event().wait()
    run_child("router", main)
"""
HTTPSERVER_WITH_EOS_TOKENS = """
    async def main(child_config, launcher):
        launcher.send(Ready())
        note(str((await launcher.recv()).eos_token_ids))
        await asyncio.Event().wait()
    run_child("httpserver", main)
"""
WORKER_WITH_EOS_TOKENS = WORKER.replace("**figures", "**figures, eos_token_ids=(2,)")


@pytest.mark.parametrize(("flags", "expected"), [((), "(2,)"), (("--eos_id", "7", "9"), "(7, 9)")])
def test_router_and_http_processes_get_the_end_tokens_of_the_model_or_the_operator(
    tmp_path: Path, flags: tuple[str, ...], expected: str
) -> None:
    scripts = {"router": ROUTER_WITH_EOS_TOKENS, "httpserver": HTTPSERVER_WITH_EOS_TOKENS}
    with start_launcher(tmp_path, *flags, worker=WORKER_WITH_EOS_TOKENS, **scripts) as server:
        server.wait_ready()

        assert server.received("router") == [expected]
        wait_until(lambda: server.received("httpserver") == [expected], "the HTTP process gets them")


def test_a_configuration_error_in_a_child_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    worker = """
        def main(child_config, launcher):
            raise ModelFilesError("tensor lm_head.weight is missing; fetch the model again")
        run_child("model worker", main)
    """
    with start_launcher(tmp_path, worker=worker) as server:
        assert server.exit_code() == 2

        message = "tensor lm_head.weight is missing; fetch the model again (see docs/model_files.md)"
        assert server.last_line() == f"lightserve: {message}"
        assert "Traceback" not in server.stderr()
        assert not server.children()
        assert server.has_cleaned_up()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def main(child_config, launcher): raise RuntimeError('boom')", "died (exit code 1): RuntimeError: boom"),
        ("def main(child_config, launcher): os.kill(os.getpid(), signal.SIGSEGV)", "died (signal 11)"),
        ("import no_such_module", "died (exit code 1)"),
        ("os.write(int(sys.argv[1]), b'nonsense' + bytes([10])); signal.pause()", "it sent an invalid message"),
    ],
)
def test_a_child_that_dies_during_the_start_is_named_and_ends_the_start(
    tmp_path: Path, source: str, message: str
) -> None:
    with start_launcher(tmp_path, worker=f"{source}\nrun_child('model worker', main)") as server:
        assert server.exit_code() == 1

        assert server.last_line().startswith("lightserve: model worker 0 died")
        assert message in server.last_line()
        assert not server.children()
        assert server.has_cleaned_up()


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("ls-router", "router"),
        ("ls-detokenizer", "detokenizer"),
    ],
)
def test_a_killed_process_is_named_clients_get_an_error_and_all_processes_end(
    tmp_path: Path, name: str, role: str
) -> None:
    with start_launcher(tmp_path) as server:
        server.wait_ready()

        server.signal_child(name, signal.SIGKILL)

        assert server.exit_code() == 1
        assert server.last_line() == f"lightserve: {role} died (signal 9)"
        assert server.received("httpserver")[-2:] == ["EngineDied", "Drain"]
        assert not server.children()
        assert server.has_cleaned_up()


def test_a_child_that_exits_with_code_0_while_serving_counts_as_dead(tmp_path: Path) -> None:
    router = """
        async def main(child_config, launcher):
            await launcher.recv()
            launcher.send(Ready())
            os.read(os.open(Path(__file__).with_name("go"), os.O_RDONLY), 1)  # until the fifo is opened
        run_child("router", main)
    """
    os.mkfifo(tmp_path / "go")
    with start_launcher(tmp_path, router=router) as server:
        server.wait_ready()

        (tmp_path / "go").write_text("x")

        assert server.exit_code() == 1
        assert server.last_line() == "lightserve: router died (exit code 0)"


def test_an_http_process_that_does_not_drain_does_not_delay_the_shutdown(tmp_path: Path) -> None:
    never_drains = """
        async def main(child_config, launcher):
            launcher.send(Ready())
            while not isinstance(await launcher.recv(), EngineDied):
                pass
            signal.pause()
        run_child("httpserver", main)
    """
    with start_launcher(tmp_path, httpserver=never_drains) as server:
        server.wait_ready()

        server.signal_child("ls-router", signal.SIGKILL)

        assert server.exit_code() == 1
        assert not server.children()


def test_the_processes_that_a_child_started_end_with_it(tmp_path: Path) -> None:
    worker = """
        def main(child_config, launcher):
            subprocess.Popen(["sleep", "1000"])
            launcher.send(EngineInfo(max_total_token_num=1, max_req_total_len=1, vocab_size=1, pipeline_depth=1))
            signal.pause()
        run_child("model worker", main)
    """
    with start_launcher(tmp_path, worker=worker) as server:
        server.wait_ready()
        assert "sleep" in server.children().values()

        server.process.send_signal(signal.SIGTERM)

        assert server.exit_code() == 0
        assert not server.children()


def test_children_exit_by_themselves_when_the_launcher_is_killed(tmp_path: Path) -> None:
    busy = """
        async def main(child_config, launcher):
            launcher.send(Ready())
            while True: pass
        run_child("detokenizer", main)
    """
    with start_launcher(tmp_path, detokenizer=busy) as server:
        server.wait_ready()
        server.signal_child("ls-router", signal.SIGSTOP)  # a stopped process cannot react by itself

        server.process.kill()

        wait_until(lambda: not server.children(), "all processes have exited")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_finish(tmp_path: Path, signum: signal.Signals) -> None:
    with start_launcher(tmp_path) as server:
        server.wait_ready()

        server.process.send_signal(signum)

        assert server.exit_code() == 0
        assert server.received("httpserver")[-1] == "Drain"
        assert f"lightserve: {signum.name}: waiting up to {DRAIN_TIMEOUT_S} s for running requests" in server.stderr()
        assert server.last_line() == "lightserve: the server has ended: all of its processes have exited"
        assert not server.children()
        assert server.has_cleaned_up()


def test_sighup_does_not_end_the_server(tmp_path: Path) -> None:
    with start_launcher(tmp_path) as server:
        server.wait_ready()

        server.process.send_signal(signal.SIGHUP)

        wait_until(lambda: "SIGHUP: keys and certificates are read again" in server.stderr(), "it logs")
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert "SIGTERM: waiting up to" in server.stderr()


def test_a_signal_to_every_process_at_once_is_not_reported_as_a_death(tmp_path: Path) -> None:
    with start_launcher(tmp_path) as server:
        server.wait_ready()

        for pid in (*server.children(), server.process.pid):
            os.kill(pid, signal.SIGTERM)

        assert server.exit_code() == 0
        assert "died" not in server.stderr()


def test_a_signal_does_not_kill_a_child_that_is_still_importing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    slow_import = """
    note(str(os.getpid()))
    Path(__file__).with_name("go").read_text()  # until the other end writes
    """
    with start_launcher(tmp_path, worker=slow_import + WORKER) as server:
        wait_until(lambda: server.received("worker"), "the worker imports")

        os.kill(int(server.received("worker")[0]), signal.SIGTERM)
        (tmp_path / "go").write_text("x")

        server.wait_ready()


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    with start_launcher(tmp_path, httpserver=BUSY_HTTPSERVER) as server:
        server.wait_ready()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "Drain" in server.received("httpserver"), "it drains")

        server.process.send_signal(signal.SIGTERM)

        assert server.exit_code() == 143
        assert server.last_line() == "lightserve: SIGTERM: stopped at once"
        assert not server.children()
        assert server.has_cleaned_up()


def test_requests_that_outlast_the_drain_end_with_an_error(tmp_path: Path) -> None:
    with start_launcher(tmp_path, "--drain_timeout=0.1", httpserver=BUSY_HTTPSERVER) as server:
        server.wait_ready()

        server.process.send_signal(signal.SIGTERM)

        assert server.exit_code() == 0
        assert server.received("httpserver")[-2:] == ["EngineDied", "Drain"]
        assert "some requests did not finish within 0.1 s (--drain_timeout)" in server.stderr()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_start_ends_the_server_at_once(tmp_path: Path, signum: signal.Signals) -> None:
    with start_launcher(tmp_path, worker=SLOW_TO_LOAD) as server:
        wait_until(lambda: server.received("worker"), "the worker loads")

        server.process.send_signal(signum)

        assert server.exit_code() == 128 + signum
        assert server.last_line() == f"lightserve: {signum.name}: stopped at once"
        assert not server.children()
        assert server.has_cleaned_up()


def test_a_log_that_cannot_be_written_does_not_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr("sys.stderr", full)

        print_line("SIGTERM: waiting for running requests")

        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            full.flush()
        with contextlib.suppress(OSError):
            full.close()


def test_a_signal_while_a_process_is_being_started_leaves_no_process(tmp_path: Path) -> None:
    with start_launcher(tmp_path) as server:
        wait_until(server.children, "the first child has started")

        server.process.send_signal(signal.SIGINT)

        assert server.exit_code() == 130
        assert not server.children()
        assert server.has_cleaned_up()


def test_a_killed_process_is_reported_before_those_that_failed_because_of_it() -> None:
    def child(role: str, exit_code: int | None, message: str | None = None) -> Any:
        return SimpleNamespace(role=role, exit_code=exit_code, exit_message=message)

    def root_cause(died: Any, *others: Any) -> str:
        config: Any = SimpleNamespace(cluster=ClusterConfig())
        processes = ProcessGroup(config, run_dir="", modules=Modules())
        processes.children = [child("detokenizer", None), *others, died]
        return str(asyncio.run(processes.root_cause(ChildDiedError(died, died.exit_code))))

    router = child("router", 1, "nonsense came")

    assert root_cause(router, child("model worker 1", -9)) == "model worker 1 died (signal 9)"
    assert root_cause(child("model worker 0", 0), router) == "router died (exit code 1): nonsense came"
    assert root_cause(router, child("model worker 0", 0)) == "router died (exit code 1): nonsense came"
