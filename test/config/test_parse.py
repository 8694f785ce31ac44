from __future__ import annotations

import math
import re
from dataclasses import fields
from typing import get_type_hints

import pytest

from lightserve.config import ClusterConfig, HttpConfig, LaunchConfig, RouterConfig, ServerConfig, WorkerConfig, http
from lightserve.config.parse import parse_server
from lightserve.errors import OptionError, ServerError
from lightserve.router.policy import POLICIES


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
    monkeypatch.setattr(http, "available_cores", lambda: cores)

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


def help_of(capsys: pytest.CaptureFixture[str], flag: str) -> str:
    with pytest.raises(SystemExit, match="0"):
        parse_server([flag])
    return capsys.readouterr().out


def names_of_options() -> list[str]:
    return [spec.name for part in get_type_hints(ServerConfig).values() for spec in fields(part)]


def test_the_full_help_has_every_flag_once_in_one_spelling(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "--help_all")

    shown = re.findall(r"^  --(\S+)", text, flags=re.MULTILINE)
    assert sorted(shown) == sorted([*names_of_options(), "config", "help", "help_all"])
    assert not re.search(r"default: .*\(default: ", text)
    assert "(default: False)" not in text


def test_the_short_help_explains_the_common_flags_and_names_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")

    text = help_of(capsys, "--help")

    explained, names = text.split("Further flags")
    assert explained.index("--model_dir") < explained.index("--port") < explained.index("--tp")
    assert len(text.splitlines()) <= 72
    for name in names_of_options():
        assert (f"--{name} " in explained) != (re.search(rf"--{name}\s", names) is not None), name


def test_values_outside_of_a_fields_limits_or_choices_are_refused_with_the_field() -> None:
    for wrong, found in (
        (lambda: RouterConfig(debug_requests=100_001), "debug_requests=100001: must be at most 100000"),
        (lambda: RouterConfig(itl_target_ms=math.inf), "itl_target_ms=inf: must be at least 1"),
        (lambda: ClusterConfig(role="guess"), "role='guess': must be one of normal, prefill, decode, both"),  # type: ignore[arg-type]
        (lambda: WorkerConfig(task="dance"), "task='dance': must be one of generate, embed, token_embed, classify"),  # type: ignore[arg-type]
    ):
        with pytest.raises(OptionError, match=found):
            wrong()


def test_the_help_lists_the_policies_of_the_registry(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "shortest_first", POLICIES["fifo"])

    assert "--router_policy {fifo,priority,cache_aware,shortest_first}" in help_of(capsys, "--help_all")
    assert parse("--router_policy shortest_first").router.router_policy == "shortest_first"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--prot 1", "unknown argument --prot; did you mean --port?"),
        ("--model-dri x", "unknown argument --model-dri; did you mean --model-dir?"),
        ("--zzz 1", "unknown argument --zzz (--help"),
        ("--port", "--port: expected one argument"),
        ("--tp x", "lightserve: --tp: invalid int value: 'x'"),
        ("a --model_dir b", "two models: a and --model_dir b; name one"),
    ],
)
def test_a_wrong_flag_is_one_line(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(line)

    [error] = capsys.readouterr().err.splitlines()
    assert message in error


@pytest.mark.parametrize("line", ["some/model --port 9", "--port 9 some/model", "some/model --model_dir some/model"])
def test_the_model_may_be_a_bare_word(line: str) -> None:
    assert parse(line).worker.model_dir == "some/model"


def test_inputs_of_packed_products_have_8_or_15_bits() -> None:
    with pytest.raises(ServerError, match="packed_input_bits=12: must be 8 or 15"):
        WorkerConfig(packed_input_bits=12)
