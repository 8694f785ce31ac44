"""Flags of gateways and engines: what does not fit is refused in one line, before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from lightserve.cli.main import main
from lightserve.config.parse import parse_server
from lightserve.errors import OptionError
from lightserve.ipc.process import ChildConfig
from lightserve.links.keys import generate
from lightserve.server.cluster_checks import check_cluster, check_nodes
from test.ports import free_port

LISTEN = "--listen=tcp://127.0.0.1:9000"
ENGINES = "--engines=tcp://a:1,tcp://b:1"


@pytest.fixture
def keys(tmp_path: Path) -> str:
    generate(tmp_path / "keys")
    return f"--cluster_keys={tmp_path / 'keys'}"


def refusal(*flags: str) -> str:
    with pytest.raises(OptionError) as error:
        check_cluster(parse_server(flags))
    return str(error.value)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (("--engines_file=/no/file",), "--engines_file: cannot read /no/file"),
        (("--engines=tcp://a:1,tcp://a:1",), "engines: tcp://a:1 is there twice"),
        (("--engines=,",), "engines: name at least one address"),
        (("--engines=a:1",), "engines='a:1': not tcp://HOST:PORT; an address is tcp://HOST:PORT"),
        (("--engines=tcp://a",), "engines='tcp://a': the port must be from 1 to 65535"),
        (("--engines=tcp://a:70000",), "engines='tcp://a:70000': "),
        (("--listen=tcp://127.0.0.1:0",), "listen='tcp://127.0.0.1:0': the port must be from 1 to 65535"),
        (("--listen=ipc:///tmp/x",), "listen='ipc:///tmp/x': not tcp://HOST:PORT"),
        ((",".join([ENGINES, *(f"tcp://c:{port}" for port in range(1, 64))]),), "65 addresses; there may be 64"),
        (
            (ENGINES, "--eos_id", "7"),
            "--eos_id cannot be used with --engines: a gateway does not compute",
        ),
        ((ENGINES, "--httpserver_workers=300"), "httpserver_workers=300: must be at most 64"),
        (
            (LISTEN, "--port=80"),
            "--port cannot be used with --listen: an engine has no HTTP; its address",
        ),
        ((LISTEN, "--no_web"), "--no_web cannot be used with --listen: an engine has no HTTP; set it"),
    ],
)
def test_flags_that_do_not_fit_are_refused_by_name(keys: str, flags: tuple[str, ...], found: str) -> None:
    assert refusal(keys, *flags).startswith(found) or found in refusal(keys, *flags)


def test_keys_are_needed_and_read_before_anything_starts(keys: str, tmp_path: Path) -> None:
    assert refusal(ENGINES) == "--engines needs --cluster_keys DIR; `lightserve cluster keygen DIR` makes the keys"
    assert refusal(LISTEN).startswith("--listen needs --cluster_keys DIR")
    assert refusal(keys).startswith("cluster_keys: there is no link to another machine")
    assert "cannot read" in refusal(LISTEN, f"--cluster_keys={tmp_path}")
    public = (tmp_path / "keys" / "engines.allowed").read_text().strip()
    (tmp_path / "keys" / "engines.allowed").write_text(f"{public} tcp://a:1\n")
    assert "engines.allowed has no key for tcp://b:1" in refusal(keys, ENGINES)


def test_a_port_in_use_is_refused(keys: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert refusal(keys, f"--listen={address}").startswith(f"listen={address}: this engine cannot listen there (")


def test_what_fits_is_accepted(keys: str) -> None:
    for flags in (
        (ENGINES, "--port=80", "--cluster_policy=session", "--request_timeout=9"),
        ("--listen=tcp://[::1]:9009",),
        ("--engines_file=/dev/null", "--port=80", "--restart_worker=off"),
    ):
        check_cluster(parse_server([keys, *flags]))


def test_an_engine_needs_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "some/model"]) == 2
    assert "--listen is missing" in capsys.readouterr().err


NODES = ("--tp=2", "--nnodes=2", "--master_addr=127.0.0.1")


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (("--nnodes=0",), "nnodes=0: must be at least 1"),
        ((*NODES, "--node_rank=2"), "node_rank=2: must be between 0 and 1 (--nnodes)"),
        ((*NODES, "--node_rank=-1"), "node_rank=-1: must be between 0 and 1 (--nnodes)"),
        (("--node_rank=1",), "node_rank=1: must be between 0 and 0 (--nnodes)"),
        (("--tp=2", "--nnodes=2"), "nnodes=2 needs --master_addr, the address of node 0"),
        (("--nnodes=2", "--master_addr=h"), "nnodes=2: it does not divide the 1 ranks of --tp 1 --pp 1"),
        (("--tp=3", "--nnodes=2", "--master_addr=h"), "nnodes=2: it does not divide the 3 ranks of --tp 3 --pp 1"),
        ((*NODES, "--master_port=0"), "master_port=0: must be between 1 and 65535"),
        ((*NODES, "--node_timeout=0"), "node_timeout=0.0: must be at least 1"),
        (("--tp=2", "--nnodes=2", "--master_addr=no such host"), "master_addr=no such host, master_port=28765: node 0"),
        (
            ("--tp=2", "--nnodes=2", "--master_addr=192.0.2.1"),
            "master_addr=192.0.2.1, master_port=28765: node 0 cannot",
        ),
    ],
)
def test_flags_of_nodes_that_do_not_fit_are_refused_by_name(keys: str, flags: tuple[str, ...], found: str) -> None:
    with pytest.raises(OptionError) as error:
        check_nodes(parse_server((keys, *flags)))
    assert str(error.value).startswith(found)


def test_the_address_of_a_server_with_one_node_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    check_nodes(parse_server(("--nccl_host=127.0.0.1", "--nccl_port=28766")))
    assert "master_addr=127.0.0.1 has no effect: there is one node (--nnodes)" in caplog.text


def test_nodes_need_a_key(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="nnodes=2 needs --cluster_keys DIR"):
        parse_server(NODES)
    with pytest.raises(OptionError, match=r"cannot read .*node\.secret"):
        check_nodes(parse_server((*NODES, f"--cluster_keys={tmp_path}")))


def test_attention_groups_are_divided_among_the_nodes(keys: str, caplog: pytest.LogCaptureFixture) -> None:
    groups = ("--tp=8", "--ep=8", "--attention_dp=4")
    config = parse_server((keys, *groups, "--nnodes=2", "--nccl_host=127.0.0.1", f"--nccl_port={free_port()}"))

    check_nodes(config)

    assert [config.node_of(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert config.num_cpu_parts == 2
    assert "every layer waits" not in caplog.text  # the ranks of a group are on one node


def test_each_node_has_whole_engines_if_their_number_allows_it(keys: str) -> None:
    place = ("--nnodes=2", "--nccl_host=127.0.0.1", f"--nccl_port={free_port()}")
    config = parse_server((keys, "--dp=4", "--tp=2", *place))
    assert [config.node_of(rank, engine) for engine in range(4) for rank in range(2)] == [0, 0, 0, 0, 1, 1, 1, 1]
    children = [ChildConfig(config, "", index=rank, engine=engine) for engine in range(4) for rank in range(2)]
    assert [child.device for child in children] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert config.num_cpu_parts == 2

    config = parse_server((keys, "--dp=3", "--pp=2", *place))
    assert [config.node_of(rank, engine) for engine in range(3) for rank in range(2)] == [0, 1, 0, 1, 0, 1]
    children = [ChildConfig(config, "", index=rank, engine=engine) for engine in range(3) for rank in range(2)]
    assert [child.device for child in children] == [0, 0, 1, 1, 2, 2]
    assert config.num_cpu_parts == 3

    with pytest.raises(OptionError, match="does not divide the 3 ranks of --tp 3 --pp 1, nor --dp 5"):
        parse_server((keys, "--dp=5", "--tp=3", *place))
    with pytest.raises(OptionError, match="roles: KV of --dp stays on one node; start engines with --listen and"):
        check_nodes(parse_server((keys, "--dp=2", "--roles=prefill,decode", *place)))


def test_a_stage_is_on_one_node_if_its_ranks_fit(keys: str, caplog: pytest.LogCaptureFixture) -> None:
    config = parse_server((keys, "--tp=2", "--pp=4", "--nnodes=2", "--nccl_host=127.0.0.1", "--nccl_port=1234"))
    assert [config.node_of(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert config.num_cpu_parts == 2
    devices = [ChildConfig(config, "", index=rank).device for rank in range(8)]
    assert devices == [0, 1, 2, 3, 0, 1, 2, 3]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"--master_port={taken.getsockname()[1]}"
        with pytest.raises(OptionError, match="node 0 cannot listen there"):
            check_nodes(parse_server((keys, *NODES, port)))
        check_nodes(parse_server((keys, *NODES, port, "--node_rank=1")))
    assert "every layer waits" not in caplog.text
