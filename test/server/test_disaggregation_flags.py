"""Flags of prefill and decode engines: what does not fit is refused in one line, before anything starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lightserve.config.parse import parse_server
from lightserve.errors import OptionError
from lightserve.ipc.process import ChildConfig
from lightserve.links.keys import generate
from lightserve.server import cluster_checks
from lightserve.server.cluster_checks import check_cluster

LISTEN = "--listen=tcp://127.0.0.1:9000"
DISAGGREGATED = ("--dp=3", "--roles=prefill,decode,decode")


@pytest.fixture
def keys(tmp_path: Path) -> str:
    generate(tmp_path / "keys")
    return f"--cluster_keys={tmp_path / 'keys'}"


def refusal(*flags: str) -> str:
    with pytest.raises(OptionError) as error:
        check_cluster(parse_server(flags))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (("--roles=prefill,decode",), "roles=prefill,decode: 2 roles for the 1 engines of --dp"),
        (("--dp=2", "--roles=prefill,decode,decode"), "3 roles for the 2 engines of --dp"),
        (("--dp=2", "--roles=prefill,guess"), "roles: 'guess' is none; a role is one of normal, prefill, decode, both"),
        (("--dp=2", "--roles=decode,decode"), "no engine is prefill or both, so no KV would be sent"),
        (("--dp=2", "--roles=decode,normal"), "no engine is prefill or both"),
        (("--dp=2", "--roles=prefill,both"), "no engine is decode, so no KV would be sent"),
        (("--role=prefill",), "role=prefill: for an engine of a gateway; start `lightserve engine --listen`"),
        (("--run_mode=decode", "--dp=2"), "role=decode: for an engine of a gateway; use --roles"),
        (("--kv_listen=tcp://a:1",), "kv_listen=tcp://a:1: only an engine with --role decode receives KV"),
        (("--min_remote_prefill_tokens=9",), "min_remote_prefill_tokens=9: set it where requests are divided"),
        ((*DISAGGREGATED, "--min_remote_prefill_tokens=0"), "min_remote_prefill_tokens"),
    ],
)
def test_flags_that_do_not_fit_are_refused_by_name(flags: tuple[str, ...], found: str) -> None:
    assert found in refusal(*flags)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (("--role=prefill", "--kv_listen=tcp://a:1"), "only an engine with --role decode receives KV"),
        (
            ("--role=decode", "--kv_listen=a:1"),
            "kv_listen='a:1': not tcp://HOST:PORT; an address is",
        ),
    ],
)
def test_flags_of_an_engine_that_do_not_fit_are_refused(keys: str, flags: tuple[str, ...], found: str) -> None:
    assert found in refusal(keys, LISTEN, *flags)


def test_engines_with_a_role_need_the_secret_of_the_cluster(keys: str, tmp_path: Path) -> None:
    path = tmp_path / "keys" / "kv.secret"
    path.chmod(0o644)
    assert "other users of this machine can read this secret key" in refusal(keys, LISTEN, "--role=decode")
    path.chmod(0o600)
    path.write_text("short")
    assert "has 5 bytes, and must have 32 at least" in refusal(keys, LISTEN, "--role=prefill")
    path.unlink()
    assert "which engines with a role need" in refusal(keys, LISTEN, "--role=prefill")
    check_cluster(parse_server((keys, LISTEN)))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="keygen makes the certificate with openssl")
def test_encrypted_kv_needs_the_certificate_of_the_cluster(keys: str, tmp_path: Path) -> None:
    path, flags = tmp_path / "keys" / "kv.pem", (LISTEN, "--role=decode", "--cluster_tls")
    check_cluster(parse_server((keys, *flags)))
    assert "cluster_tls: it encrypts KV between machines, and needs --role" in refusal(keys, LISTEN, "--cluster_tls")
    path.chmod(0o644)
    assert "other users of this machine can read this secret key" in refusal(keys, *flags)
    path.chmod(0o600)
    path.write_text(path.read_text().partition("-----BEGIN CERTIFICATE")[0])
    assert "kv.pem is no certificate with its private key" in refusal(keys, *flags)
    path.unlink()
    assert "which engines with --cluster_tls need" in refusal(keys, *flags)


def test_a_transport_is_for_engines_with_roles_that_have_it(keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = "--kv_transport=nixl"
    assert "engines without roles send no KV" in refusal(flag)
    assert "set --cluster_tls" in refusal(keys, LISTEN, "--role=decode", flag)
    monkeypatch.setattr(cluster_checks, "find_spec", lambda _: None)
    assert "it is not installed; run: pip install 'nixl" in refusal(*DISAGGREGATED, flag)
    monkeypatch.setattr(cluster_checks, "find_spec", lambda _: "it is there")
    check_cluster(parse_server((*DISAGGREGATED, flag)))


def test_every_engine_has_its_role_and_its_addresses(keys: str) -> None:
    disaggregated = parse_server(DISAGGREGATED)
    check_cluster(disaggregated)
    assert [disaggregated.cluster.role_of(number) for number in range(3)] == ["prefill", "decode", "decode"]
    assert ChildConfig(disaggregated, "/run", engine=2).kv_address(1, 4) == "unix:///run/kv-1-4.2"

    normal = parse_server((keys, LISTEN, "--run_mode", "normal"))
    assert normal.cluster.role_of(0) == "normal"
    assert not normal.cluster.is_disaggregated

    for flags, first, second in (
        ((), "tcp://127.0.0.1:9001", "tcp://127.0.0.1:9002"),
        (("--kv_listen=tcp://10.0.0.2:7000",), "tcp://10.0.0.2:7000", "tcp://10.0.0.2:7001"),
        (("--kv_listen=tcp://[::1]:7000",), "tcp://[::1]:7000", "tcp://[::1]:7001"),
        (("--kv_listen=unix:///run/kv",), "unix:///run/kv", "unix:///run/kv-1"),
    ):
        config = parse_server((keys, LISTEN, "--role=decode", *flags))
        assert [ChildConfig(config, "/run").kv_address(rank, 3) for rank in range(2)] == [first, second]


def test_ranks_of_another_node_receive_at_its_own_address(keys: str, tmp_path: Path) -> None:
    listen, place = (
        "--listen=tcp://192.0.2.7:9000",
        ("--nnodes=2", "--master_addr=127.0.0.1", "--node_rank=1", "--pp=2"),
    )
    for flags, address in (
        ((), "tcp://127.0.0.1:9002"),  # from where it reaches node 0
        (("--kv_listen=tcp://127.0.0.2:7000",), "tcp://127.0.0.2:7001"),
    ):
        config = parse_server((keys, listen, *place, "--role=decode", *flags))
        check_cluster(config)
        assert ChildConfig(config, "/run").kv_address(1, 0) == address

    found = refusal(keys, listen, *place, "--role=decode", "--kv_listen=tcp://192.0.2.7:7000")
    assert found.startswith("kv_listen=tcp://192.0.2.7:7000: this machine cannot listen there (")
    assert found.endswith("; each node has a --kv_listen of its own, or none")
    (tmp_path / "keys" / "kv.secret").unlink()
    assert "which engines with a role need" in refusal(keys, listen, *place, "--role=decode")
