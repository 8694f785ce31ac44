"""The secrets of a cluster with which engines that send each other KV over TCP know each other, and encrypt it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from lightserve.errors import OptionError
from lightserve.links.tls import PeerContexts, peer_contexts

KV_SECRET = "kv.secret"  # in the folder of --cluster_keys; the same on all engines
KV_CERTIFICATE = "kv.pem"  # a certificate with its private key, there too; for --cluster_tls
MIN_BYTES = 32
FOR_OTHER_USERS = 0o007


def read_kv_secret(folder: str) -> bytes:
    path = Path(folder) / KV_SECRET
    secret = _read_secret(path, "engines with a role").strip()
    if len(secret) < MIN_BYTES:
        raise OptionError(f"{path} has {len(secret)} bytes, and must have {MIN_BYTES} at least")
    return secret


def read_kv_certificate(folder: str) -> PeerContexts:
    path = Path(folder) / KV_CERTIFICATE
    _read_secret(path, "engines with --cluster_tls")
    try:
        return peer_contexts(str(path))
    except (OSError, ValueError) as error:
        raise OptionError(f"{path} is no certificate with its private key, without a password, in PEM") from error


def make_kv_certificate(folder: Path) -> Path | None:
    """None: this machine has no openssl."""
    path, openssl = folder / KV_CERTIFICATE, shutil.which("openssl")
    if openssl is None:
        return None
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))  # openssl keeps these permissions
    kind = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "36500")
    command = [openssl, "req", *kind, "-subj", "/CN=lightserve-kv", "-keyout", str(path), "-out", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return path


def _read_secret(path: Path, user: str) -> bytes:
    try:
        secret = path.read_bytes()
        is_open = path.stat().st_mode & FOR_OTHER_USERS
    except OSError as error:
        raise OptionError(
            f"--cluster_keys: cannot read {path} ({error.strerror}), which {user} need; "
            "`lightserve cluster keygen DIR` makes it"
        ) from error
    if is_open:
        raise OptionError(f"{path}: other users of this machine can read this secret key; protect it with chmod 600")
    return secret
