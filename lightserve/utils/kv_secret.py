"""The secret of a cluster with which engines that send each other KV over TCP know each other."""

from __future__ import annotations

from pathlib import Path

from lightserve.errors import OptionError

KV_SECRET = "kv.secret"  # in the folder of --cluster_keys; the same on all engines
MIN_BYTES = 32
FOR_OTHER_USERS = 0o007


def read_kv_secret(folder: str) -> bytes:
    path = Path(folder) / KV_SECRET
    try:
        secret = path.read_bytes().strip()
        is_open = path.stat().st_mode & FOR_OTHER_USERS
    except OSError as error:
        raise OptionError(
            f"--cluster_keys: cannot read {path} ({error.strerror}), which engines with a role need; "
            "`lightserve cluster keygen DIR` makes it"
        ) from error
    if is_open:
        raise OptionError(f"{path}: other users of this machine can read this secret key; protect it with chmod 600")
    if len(secret) < MIN_BYTES:
        raise OptionError(f"{path} has {len(secret)} bytes, and must have {MIN_BYTES} at least")
    return secret
