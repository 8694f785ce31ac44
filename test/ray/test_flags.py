"""The flags of lightserve deploy: each goes to the engines, to the gateway or to both."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import lightserve.ray
from lightserve.cli.deploy import arguments
from lightserve.cli.main import main
from lightserve.config.parse import parse_server
from lightserve.errors import OptionError
from lightserve.ray.flags import bundle_of, make_deployment, parse_replicas
from lightserve.ray.messages import ReplicaGroup
from lightserve.ray.node_folder import free_port, free_ports, make_folder, write_flags
from lightserve.ray.placement import Node
from lightserve.ray.supervised_process import SupervisedProcess, lightserve_command
from test.waiting import wait_until

GPUS = [Node("1", "a", {}, {"GPU": 8.0, "CPU": 16.0})]
CPUS = [Node("1", "a", {}, {"CPU": 16.0})]


def test_each_flag_goes_where_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTSERVE_API_KEY", "from the environment")
    (tmp_path / "keys").write_text("in a file\n")
    flags = ["m", "--tp=2", "--port=80", f"--api_key_file={tmp_path / 'keys'}", "--max_queue_size=9", "--no_web"]
    made = make_deployment(parse_server([*flags, "--cluster_policy=session", "--drain_timeout=5"]), "d", "2:8")

    assert made.engine_flags == {"model_dir": "m", "tp": 2, "max_queue_size": 9, "drain_timeout": 5.0}
    assert made.gateway_flags == {
        "model_dir": "m",
        "port": 80,
        "api_key": ["in a file", "from the environment"],
        "no_web": True,
        "max_queue_size": 9,
        "drain_timeout": 5.0,
        "cluster_policy": "session",
    }
    assert made.groups == [ReplicaGroup(2, 8)]


@pytest.mark.parametrize(
    ("flags", "allowed"),
    [
        ([], ["localhost"]),
        (["--host=0.0.0.0"], ["*"]),
        (["--host=0.0.0.0", "--allowed_hosts", "a.example"], ["a.example"]),
    ],
)
def test_gateways_behind_a_proxy_allow_the_names_of_the_proxy(flags: list[str], allowed: list[str]) -> None:
    made = make_deployment(parse_server(["m", *flags]), "d", "1", gateways=2)

    assert made.gateway_flags["allowed_hosts"] == allowed


def test_flags_come_back_from_the_file_that_a_process_reads(tmp_path: Path) -> None:
    flags = ["m", "--tp=2", "--eos_id", "3", "4", "--mem_fraction=0.5", "--quantization=int8", "--deterministic"]
    made = make_deployment(parse_server(flags), "d", "1")
    write_flags(tmp_path / "flags", made.engine_flags)

    read = parse_server([f"--config={tmp_path / 'flags'}"])

    assert read.worker == parse_server(flags).worker
    assert (tmp_path / "flags").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "0", "3:2", "a", "1:2:3", "-1", ":2"])
def test_wrong_numbers_of_replicas_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"^replicas="):
        parse_replicas(text)


def test_roles_have_numbers_of_replicas() -> None:
    flags = ["m", "--cluster_tls", "--min_remote_prefill_tokens=64", "--tp=2"]
    made = make_deployment(parse_server(flags), "d", None, roles="prefill=1:2, decode=3")

    assert made.groups == [ReplicaGroup(1, 2, "prefill"), ReplicaGroup(3, 3, "decode")]
    assert made.engine_flags == {"model_dir": "m", "tp": 2, "cluster_tls": True}
    assert made.gateway_flags == {"model_dir": "m", "min_remote_prefill_tokens": 64}
    assert make_deployment(parse_server(["m"]), "d", None).groups == [ReplicaGroup(1, 1)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "'' has no number; write prefill=1:2,decode=2:4"),
        ("prefill,decode", "'prefill' has no number"),
        ("prefill=1,", "'' has no number"),
        ("prefill=0,decode=1", "prefill='0': must be at least 1, and MIN not above MAX"),
        ("prefill=1,decode=4:2", "decode='4:2': must be at least 1, and MIN not above MAX"),
        ("prefill=,decode=1", "prefill='': must be a number, or MIN:MAX"),
        ("prefill=1,decoder=1", "'decoder' is none; a role is one of normal, prefill, decode, both"),
        ("prefill=1,decode=1,prefill=2", "prefill is there twice"),
        ("prefill=1", "no replica is decode, so no KV would be sent; use --replicas without roles"),
        ("decode=1,normal=1", "no replica is prefill or both"),
    ],
)
def test_wrong_roles_are_refused(text: str, found: str) -> None:
    with pytest.raises(OptionError) as error:
        make_deployment(parse_server(["m"]), "d", None, roles=text)

    assert str(error.value).startswith(f"roles={text!r}: {found}")


@pytest.mark.parametrize(
    ("flags", "roles", "found"),
    [
        (["--cluster_tls"], None, "cluster_tls: replicas without roles send no KV; set --roles"),
        (["--min_remote_prefill_tokens=9"], None, "min_remote_prefill_tokens: replicas without roles"),
        (["--max_loras=2"], None, "max_loras: lightserve deploy places no adapters on nodes; use --engines"),
        (["--kv_transport=nixl"], "prefill=1,decode=1", "kv_transport=nixl: .*; set --cluster_tls"),
        (
            ["--null_worker"],
            "prefill=1,decode=1",
            "--null_worker cannot be used with --role prefill: it has no KV to send",
        ),
        (
            ["--disable_dynamic_prompt_cache"],
            "prefill=1,decode=1",
            "--role prefill cannot be used with --disable_dynamic_prompt_cache",
        ),
    ],
)
def test_flags_that_do_not_fit_the_roles_are_refused(flags: list[str], roles: str | None, found: str) -> None:
    with pytest.raises(OptionError, match=f"^{found}"):
        make_deployment(parse_server(["m", *flags]), "d", None, roles=roles)


def test_replicas_and_roles_exclude_each_other() -> None:
    with pytest.raises(OptionError, match=r"^replicas and roles exclude each other"):
        make_deployment(parse_server(["m"]), "d", "2", roles="prefill=1,decode=1")
    parsed = arguments().parse(["m", "--roles", "prefill=1,decode=1"])
    assert (parsed.roles, parsed.replicas) == ("prefill=1,decode=1", None)


def test_ports_of_an_engine_and_its_ranks_follow_each_other() -> None:
    first = free_ports("127.0.0.1", 4)

    assert [free_port("127.0.0.1", port) for port in range(first, first + 4)] == list(range(first, first + 4))
    with pytest.raises(OSError, match="has no 70000 free ports in a row"):
        free_ports("127.0.0.1", 70_000)


def test_what_deploy_sets_itself_is_refused() -> None:
    listen = ["--cluster_keys=k", "--listen=tcp://a:1"]
    for flags, name in ((["--dp=2"], "dp"), (listen, "listen"), (["--role=decode"], "role")):
        with pytest.raises(OptionError, match=f"^{name}: not with lightserve deploy"):
            make_deployment(parse_server(flags), "d", "1")
    with pytest.raises(OptionError, match=r"^name='a/b'"):
        make_deployment(parse_server([]), "a/b", "1")


def test_a_replica_takes_a_gpu_for_each_rank_or_cpus_where_there_are_none() -> None:
    two = parse_server(["--tp=2"])

    assert bundle_of(two, GPUS, None) == {"GPU": 2.0, "CPU": 1.0}
    assert bundle_of(two, GPUS, 4.0) == {"GPU": 2.0, "CPU": 4.0}
    assert bundle_of(two, CPUS, None) == {"CPU": 2.0}
    assert bundle_of(parse_server(["--device=cpu"]), GPUS, None) == {"CPU": 1.0}


def test_a_command_without_ray_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("cluster", "client"):  # another test of this process may have imported them
        monkeypatch.delitem(sys.modules, f"lightserve.ray.{name}", raising=False)
        monkeypatch.delattr(lightserve.ray, name, raising=False)

    assert main(["status"]) == 2
    assert "this command needs Ray; install it with: pip install 'ray[serve]<" in capsys.readouterr().err


def test_a_process_that_fails_is_started_again_until_it_is_drained() -> None:
    supervised = SupervisedProcess(lambda: lightserve_command("engine", "/no/model"))  # without --listen

    wait_until(lambda: supervised.status().restarts > 0)
    found = supervised.status()
    supervised.drain()

    assert found.exit_code == 2
    assert "--listen is missing" in supervised.status().reason
    assert supervised.wait(30.0)
    assert supervised.status().state == "stopped"


def test_folders_of_processes_that_were_killed_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / f"lightserve-ray-{2**22 + 1}-x"  # no process has such a number
    left.mkdir()
    (left / "engine.secret").write_text("key")

    own = make_folder()

    assert not left.exists()
    assert own.stat().st_mode & 0o777 == 0o700
    assert make_folder() != own
    assert own.exists()
    assert own.name.startswith(f"lightserve-ray-{os.getpid()}-")
