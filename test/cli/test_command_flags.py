"""The help of a command lists the flags that the command takes, and no others."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from lightserve.cli.completion.flags import all_commands
from lightserve.cli.main import main
from lightserve.config.parse import parse_server, server_parser
from lightserve.errors import LightserveError, OptionError
from lightserve.links.keys import generate
from lightserve.ray.flags import make_deployment
from lightserve.server.cluster_checks import check_cluster

LISTEN = "--listen=tcp://127.0.0.1:9000"
NOT_OF_AN_ENGINE = "cannot be used with --listen|there is one engine"


def help_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit, match="0"):
        main(argv)
    return capsys.readouterr().out


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"--(\w+)", "\n".join(re.findall(r"^  --\w+", text, flags=re.MULTILINE))))


def options() -> list[argparse.Action]:
    return [one for one in server_parser()._actions if one.dest not in ("model", "config", "help", "help_all")]


def with_another_value(action: argparse.Action) -> list[str]:
    """A flag with a value that is not its default."""
    flag = action.option_strings[0]
    if action.nargs == 0:
        return [flag]
    if action.choices is not None:
        return [flag, next(str(one) for one in action.choices if one != action.default)]
    if action.type in (int, float):
        return [flag, str((action.default or 1) + 1)] if not isinstance(action.default, list) else [flag, "3"]
    return [flag, "tcp://a:1" if action.dest == "engines" else "x"]


def reaction_of_an_engine(keys: str, flag: list[str]) -> str:
    try:
        check_cluster(parse_server([keys, LISTEN, *flag]))
    except OptionError as error:
        return "refused" if re.search(NOT_OF_AN_ENGINE, str(error)) else "value is wrong"
    return "taken"


def test_the_help_of_an_engine_lists_exactly_what_an_engine_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(tmp_path / "keys")
    keys = f"--cluster_keys={tmp_path / 'keys'}"
    shown = flags_in(help_of(capsys, "engine", "--help_all"))

    reactions = {one.dest: reaction_of_an_engine(keys, with_another_value(one)) for one in options()}

    refused = {name for name, reaction in reactions.items() if reaction == "refused"}
    assert {"host", "port", "api_key", "dp", "engines"} <= refused
    assert shown & refused == set()
    assert {name for name in reactions.keys() - shown if reactions[name] == "taken"} == set()


def test_the_help_of_an_engine_begins_with_what_it_does_and_needs(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "engine", "--help")

    explained, names = text.split("Further flags")
    assert "Compute for servers on other machines" in explained
    assert {"listen", "cluster_keys", "role", "tp"} <= flags_in(explained)
    assert "--host" not in text
    assert "HTTP:" not in names


@pytest.mark.parametrize("flag", ["--port=80", "--host=0.0.0.0"])
def test_an_engine_that_gets_a_port_is_told_of_its_address(tmp_path: Path, flag: str) -> None:
    generate(tmp_path / "keys")
    with pytest.raises(OptionError, match=r"an engine has no HTTP; its address is --listen tcp://HOST:PORT"):
        check_cluster(parse_server([f"--cluster_keys={tmp_path / 'keys'}", LISTEN, flag]))


def test_the_help_of_deploy_has_nothing_that_deploy_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    shown = flags_in(help_of(capsys, "deploy", "--help_all"))

    assert [one.dest for one in options() if one.dest in shown and is_refused_by_deploy(one)] == []


def is_refused_by_deploy(action: argparse.Action) -> bool:
    try:
        make_deployment(parse_server([*with_another_value(action)]), "d", None)
    except LightserveError as error:
        return "not with lightserve deploy" in str(error) or "cannot be used with --listen" in str(error)
    return False


def test_the_help_of_generate_has_no_flags_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    shown = flags_in(help_of(capsys, "generate", "--help"))

    assert {"model_dir", "kv_ram_gb"} <= shown
    assert not {"host", "router_policy"} & shown
    assert not {"host", "router_policy"} & {
        flag.name.lstrip("-") for one in all_commands() if one.name == "generate" for flag in one.flags
    }


def test_shells_complete_what_the_help_lists(capsys: pytest.CaptureFixture[str]) -> None:
    (engine,) = [command for command in all_commands() if command.name == "engine"]

    assert {flag.name.lstrip("-") for flag in engine.flags} == flags_in(help_of(capsys, "engine", "--help_all"))
