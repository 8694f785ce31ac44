"""An engine of --dp whose router dies is restarted; the server ends with the last engine."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from lightserve.server.supervisor import MAX_FAILED_RESTARTS
from test.server.launcher_process import start_launcher, wait_until
from test.vision_model import save_vision_model

ROUTER = """
    async def main(child_config, launcher):
        note(f"{child_config.engine} {child_config.epoch} {child_config.generation}")
        await launcher.recv()
        if child_config.epoch and Path(__file__).with_name("broken").exists():
            raise RuntimeError("no memory is left")
        launcher.send(Ready())
        await asyncio.Event().wait()
    run_child("router", main)
"""
WORKER = """
    def main(child_config, launcher):
        note(f"{child_config.engine} {child_config.device} {os.environ['OMP_NUM_THREADS']}")
        if child_config.index == 0:
            Path(child_config.rendezvous_path).touch(exist_ok=False)
        figures = dict(max_total_token_num=4096, max_req_total_len=512, vocab_size=64, pipeline_depth=1)
        launcher.send(EngineInfo(**figures))
        signal.pause()
    run_child("model worker", main)
"""


def test_an_engine_whose_router_dies_is_restarted_and_the_dispatcher_is_informed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with start_launcher(tmp_path, "--dp=2", "--tp=2", worker=WORKER, router=ROUTER) as server:
        server.wait_ready()
        workers = {pid for pid, name in server.children().items() if "worker" in name}
        assert sorted(line.split()[:2] for line in server.received("worker")) == [
            ["0", "0"],
            ["0", "1"],
            ["1", "2"],
            ["1", "3"],
        ]

        server.signal_child("ls-router-1", signal.SIGKILL)

        server.wait_for_output("engine 1 is back")
        wait_until(lambda: len(server.received("dispatcher")) == 4, "the dispatcher is informed")
        assert server.received("dispatcher") == ["EngineJoined 0", "EngineJoined 1", "EngineLost 1", "EngineJoined 1"]
        assert server.received("router")[-1] == "1 1 1"
        assert "lightserve: router of engine 1 died (signal 9); restarting engine 1" in server.stderr()
        assert "8,192 tokens in 2 engines" in server.stderr()
        assert len(workers & set(server.children())) == 2
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert not server.children()
        assert server.has_cleaned_up()


def test_an_engine_that_fails_again_and_again_is_given_up_and_the_server_ends_with_the_last_one(tmp_path: Path) -> None:
    with start_launcher(tmp_path, "--dp=2", router=ROUTER) as server:
        server.wait_ready()
        (tmp_path / "broken").touch()

        server.signal_child("ls-router-1", signal.SIGKILL)

        server.wait_for_output("giving up this engine; 1 of 2 are left")
        assert server.stderr().count("restarting engine 1") == MAX_FAILED_RESTARTS
        wait_until(lambda: sorted(server.children().values()).count("ls-worker-1") == 0, "its workers have exited")
        assert "ls-router" in server.children().values()
        server.signal_child("ls-router", signal.SIGKILL)
        assert server.exit_code() == 1
        assert server.last_line().endswith("router of engine 0 died (exit code 1): RuntimeError: no memory is left")
        assert not server.children()
        assert server.has_cleaned_up()


def test_encoders_that_are_stopped_with_their_routers_have_not_failed(tmp_path: Path) -> None:
    (tmp_path / "vision").mkdir()
    vision, _ = save_vision_model(tmp_path / "vision")
    with start_launcher(tmp_path, "--dp=2", f"--model_dir={vision}") as server:
        server.wait_ready()

        for deaths in range(MAX_FAILED_RESTARTS + 1):
            wait_until(lambda deaths=deaths: server.stderr().count("a new encoder is ready") == deaths, "it is back")  # type: ignore[misc]
            wait_until(lambda deaths=deaths: server.stderr().count("engine 1 is back") == deaths, "it is back")  # type: ignore[misc]
            server.signal_child("ls-router-1", signal.SIGKILL)

        server.wait_for_output("giving up this engine; 1 of 2 are left")
        wait_until(lambda: "ls-encoder-1" not in server.children().values(), "its encoder has exited")
        assert "ls-encoder" in server.children().values()
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0


def test_restarts_may_be_switched_off(tmp_path: Path) -> None:
    with start_launcher(tmp_path, "--dp=2", "--restart_worker=off", router=ROUTER) as server:
        server.wait_ready()

        server.signal_child("ls-router", signal.SIGKILL)

        assert server.exit_code() == 1
        assert server.last_line() == "lightserve: router of engine 0 died (signal 9)"


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (("--dp=0",), "dp=0: must be at least 1"),
        (("--dp=65",), "dp=65: must be at most 64"),
        (("--dp=2", "--cluster_policy=best"), "--cluster_policy: invalid choice: 'best'"),
        (("--cluster_policy=session",), "cluster_policy=session: there is one engine; set --dp to 2 or more"),
    ],
)
def test_bad_flags_get_one_line(tmp_path: Path, flags: tuple[str, ...], found: str) -> None:
    with start_launcher(tmp_path, *flags) as server:
        assert server.exit_code() == 2
        assert found in server.stderr()
        assert len(server.stderr().splitlines()) == 1
