from __future__ import annotations

import pytest

from lightserve import config as config_module
from lightserve.config import HttpConfig, LaunchConfig, RouterConfig, ServerConfig, WorkerConfig
from lightserve.errors import ServerError
from lightserve.server.args import parse_server


def parse(line: str) -> ServerConfig:
    return parse_server(line.split())


def test_without_flags_every_option_has_its_default() -> None:
    assert parse_server([]) == ServerConfig(
        worker=WorkerConfig(), router=RouterConfig(), http=HttpConfig(), launch=LaunchConfig()
    )


def test_each_flag_sets_its_part_of_the_config() -> None:
    config = parse("--tp 2 --max-queue-size 5 --port 9 --drain_timeout 1.5 --use_tgi_api")

    assert config.worker.tp == 2
    assert config.router.max_queue_size == 5
    assert (config.http.port, config.http.use_tgi_api) == (9, True)
    assert config.launch.drain_timeout == 1.5


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (2, 1), (7, 1), (8, 2), (16, 4), (192, 4)])
def test_http_processes_are_as_many_as_cores_allow(cores: int, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "available_cores", lambda: cores)

    assert HttpConfig().num_processes == processes
    assert HttpConfig(httpserver_workers=3).num_processes == 3


def test_lists_take_several_values() -> None:
    config = parse("--eos_id 1 2 --api-key a b --allowed_origins *")

    assert config.router.eos_id == [1, 2]
    assert config.http.api_key == ["a", "b"]
    assert config.http.allowed_origins == ["*"]


def test_an_option_without_a_default_takes_its_choices() -> None:
    assert parse("--quantization int8").worker.quantization == "int8"
    assert parse("").worker.quantization is None


def test_the_names_of_other_servers_work() -> None:
    config = parse("--model x --tensor-parallel-size 4 --served-model-name y --max-num-seqs 3")

    assert (config.worker.model_dir, config.worker.tp, config.worker.running_max_req_size) == ("x", 4, 3)
    assert config.http.model_name == ["y"]


@pytest.mark.parametrize("flag", ["--served-model-name", "--served_model_name", "--model_name", "--model-name"])
def test_a_model_may_have_several_names(flag: str) -> None:
    config = parse(f"{flag} big claude-haiku --port 9")

    assert (config.http.model_name, config.http.port) == (["big", "claude-haiku"], 9)
    assert config.http.first_model_name("folder") == "big"
    assert HttpConfig().first_model_name("folder") == "folder"


def test_help_groups_flags_by_the_process_that_needs_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_server(["--help"])

    text = capsys.readouterr().out
    places = [text.index(f"\n{group}:\n") for group in ("worker", "router", "http", "launch")]
    assert places == sorted(places)
    assert places[2] < text.index("--api-key") < places[3]


def test_deterministic_mode_refuses_more_than_two_ranks() -> None:
    assert parse("--deterministic --tp 2").worker.deterministic
    with pytest.raises(ServerError, match="deterministic needs tp 1 or 2"):
        parse("--deterministic --tp 4")
