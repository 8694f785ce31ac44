"""--config: flags in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightserve.config import ServerConfig
from lightserve.config.parse import parse_server
from lightserve.errors import ServerError


def parse(folder: Path, text: str, *argv: str) -> ServerConfig:
    path = folder / "server.yaml"
    path.write_text(text)
    return parse_server([*argv, "--config", str(path)])


def test_the_file_sets_what_the_command_line_does_not(tmp_path: Path) -> None:
    text = "port: 8080\nhost: 0.0.0.0\nmodel: big\nno_web: true\napi_key: [a, b]\nrequest_timeout: 1.5\n"

    config = parse(tmp_path, text, "--port", "9", "--api_key", "c")

    assert (config.http.port, config.http.host, config.http.api_key) == (9, "0.0.0.0", ["c"])
    assert (config.worker.model_dir, config.http.no_web, config.router.request_timeout) == ("big", True, 1.5)
    assert config.router.max_queue_size == 2048


def test_a_flag_with_the_default_value_wins_too(tmp_path: Path) -> None:
    assert parse(tmp_path, "port: 8080", "--port", "8000").http.port == 8000


def test_the_model_of_the_command_line_replaces_that_of_the_file(tmp_path: Path) -> None:
    assert parse(tmp_path, "model_dir: of-the-file", "of-the-command").worker.model_dir == "of-the-command"
    assert parse(tmp_path, "model_dir: of-the-file").worker.model_dir == "of-the-file"


def test_values_become_what_the_flag_takes(tmp_path: Path) -> None:
    text = (
        "restart_worker: off\nmax-model-len: 512\nmodel_name: one\nquantization: none\n"
        "default_chat_template_kwargs: {enable_thinking: false}\ndrain_timeout: 3\ntp: null\nno_web: false\n"
    )

    config = parse(tmp_path, text)

    assert config.launch.restart_worker == "off"  # YAML reads it as a boolean
    assert (config.worker.max_req_total_len, config.http.model_name, config.worker.tp) == (512, ["one"], 1)
    assert config.worker.quantization == "none"
    assert config.http.template_variables == {"enable_thinking": False}
    assert isinstance(config.launch.drain_timeout, float)
    assert config.http.no_web is False


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert parse(tmp_path, "# nothing\n") == parse_server([])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 8080", "unknown key 'prot'; did you mean port?"),
        ("xyzzy: 1", "unknown key 'xyzzy'; lightserve serve --help_all lists the flags"),
        ("config: other.yaml", "unknown key 'config'"),
        ("port: many", "port: 'many' is not a whole number"),
        ("port: 80.5", "port: 80.5 is not a whole number"),
        ("port: true", "port: True is not a whole number"),
        ("no_web: 3", "no_web: 3 is not true or false"),
        ("device: [cpu, cuda]", r"device: \['cpu', 'cuda'\] is not a text"),
        ("kv_dtype: int3", "kv_dtype: 'int3' is not one of auto, none, fp8, int8"),
        ("model: a\nmodel_dir: b", "model_dir sets model_dir a second time; remove one"),
        ("- port", "must have one `flag: value` per line, not a list"),
        ("port: [", "not YAML"),
    ],
)
def test_a_mistake_names_the_file_and_the_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ServerError, match=message) as caught:
        parse(tmp_path, text)

    assert str(tmp_path / "server.yaml") in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"absent\.yaml: cannot be read"):
        parse_server(["--config", str(tmp_path / "absent.yaml")])
