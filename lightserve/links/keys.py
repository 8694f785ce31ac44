"""The CURVE keys of a cluster, as files in one folder.

    an engine needs     engine.secret    its secret key     gateways.allowed    public keys that it accepts
    a gateway needs     gateway.secret   its secret key     engines.allowed     public keys that it accepts
    with roles, all engines need the same kv.secret and kv.pem too: see links/kv_secret.py
    a node needs        node.secret      the key that all nodes of one engine (--nnodes) have

Keys are in ZMQ's Z85 text, one per line. A line of engines.allowed may have an address behind the key: then it is the
key of that engine only.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from lightserve.errors import OptionError
from lightserve.links.kv_secret import KV_CERTIFICATE, KV_SECRET, make_kv_certificate

KEY_LEN = 40  # characters of 32 bytes in Z85
FOR_OTHER_USERS = 0o007
ENGINE_SECRET, GATEWAY_SECRET, NODE_SECRET = "engine.secret", "gateway.secret", "node.secret"
ALLOWED_ENGINES, ALLOWED_GATEWAYS = "engines.allowed", "gateways.allowed"


@dataclass(frozen=True, slots=True)
class EngineKeys:
    secret: bytes
    gateways: frozenset[bytes]  # public keys, 32 bytes each


@dataclass(frozen=True, slots=True)
class GatewayKeys:
    secret: bytes
    engines: dict[str, bytes]  # public key by the address of an engine; "": of all other engines

    def key_of(self, address: str) -> bytes | None:
        return self.engines.get(address) or self.engines.get("")


def generate(folder: Path) -> list[Path]:
    """Write new pairs for engines, gateways and nodes, and the secrets of engines with roles.

    Raises if one of the files exists. Returns those that were written: without openssl, KV_CERTIFICATE is not.
    """
    engine_public, engine_secret = zmq.curve_keypair()
    gateway_public, gateway_secret = zmq.curve_keypair()
    contents = {
        ENGINE_SECRET: engine_secret,
        ALLOWED_ENGINES: engine_public,
        GATEWAY_SECRET: gateway_secret,
        ALLOWED_GATEWAYS: gateway_public,
        KV_SECRET: zmq.curve_keypair()[1],  # any random text
        NODE_SECRET: zmq.curve_keypair()[1],
    }
    paths = [folder / name for name in contents]
    if existing := next((path for path in [*paths, folder / KV_CERTIFICATE] if path.exists()), None):
        raise OptionError(f"{existing} exists, and is not overwritten: choose another folder, or remove its keys first")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, key in zip(paths, contents.values(), strict=True):
            _write(path, key)
        certificate = make_kv_certificate(folder)
    except OSError as error:
        raise OptionError(f"{folder}: keys cannot be written ({error.strerror}); choose another folder") from error
    return paths if certificate is None else [*paths, certificate]


def read_engine_keys(folder: str) -> EngineKeys:
    public = [key for key, _ in _read_allowed(Path(folder) / ALLOWED_GATEWAYS)]
    return EngineKeys(_read_secret(Path(folder) / ENGINE_SECRET), frozenset(map(z85.decode, public)))


def read_gateway_keys(folder: str) -> GatewayKeys:
    path = Path(folder) / ALLOWED_ENGINES
    engines: dict[str, bytes] = {}
    for key, address in _read_allowed(path):
        if address in engines:
            reason = f"two keys for {address}" if address else "two keys without an address"
            raise OptionError(f"{path}: {reason}; write the address of its engine behind a key")
        engines[address] = key
    return GatewayKeys(_read_secret(Path(folder) / GATEWAY_SECRET), engines)


def read_node_key(folder: str) -> bytes:
    """The secret key of all nodes."""
    return _read_secret(Path(folder) / NODE_SECRET)


def _write(path: Path, key: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key + b"\n")


def _read_secret(path: Path) -> bytes:
    lines = _lines_of(path)
    if path.stat().st_mode & FOR_OTHER_USERS:
        raise OptionError(f"{path}: other users of this machine can read this secret key; protect it with chmod 600")
    if len(lines) != 1:
        raise OptionError(f"{path} has {len(lines)} keys, and must have one")
    return _checked(path, lines[0])


def _read_allowed(path: Path) -> list[tuple[bytes, str]]:
    """Keys, each with the rest of its line."""
    lines = [line.partition(" ") for line in _lines_of(path)]
    if not lines:
        raise OptionError(f"{path} has no key: nobody could connect; write one key per line")
    return [(_checked(path, key), address.strip()) for key, _, address in lines]


def _lines_of(path: Path) -> list[str]:
    """Without empty lines and comments. A # can be part of a key, but a comment has a space behind it."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError) as error:
        raise OptionError(
            f"--cluster_keys: cannot read {path} ({error}); `lightserve cluster keygen DIR` makes keys"
        ) from error
    return [line for line in lines if line and line != "#" and not line.startswith("# ")]


def _checked(path: Path, text: str) -> bytes:
    try:
        key = text.encode("ascii")
        if len(key) != KEY_LEN or len(z85.decode(key)) != KEY_LEN * 4 // 5:
            raise ValueError
    except (KeyError, ValueError, struct.error) as error:
        raise OptionError(
            f"{path}: a line is not a key of {KEY_LEN} characters; `lightserve cluster keygen DIR` makes keys"
        ) from error
    return key
