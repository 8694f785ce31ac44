from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from lightserve.config.parse import parse_server
from lightserve.messages.control import CpuKvSize, EngineInfo, KvIdentity
from lightserve.router.kv.identity import CACHE, file_hashes, kv_identity
from test.server.launcher_process import tiny_model

KV = KvIdentity(1, 1, "0.1.0", "a model", "in bfloat16 on cuda", "a layout")


@pytest.mark.parametrize("field", KvIdentity.__struct_fields__)
def test_stored_kv_has_the_identity_of_what_the_workers_compute(tmp_path: Path, field: str) -> None:
    config = parse_server([str(tiny_model(tmp_path)), "--load_format=dummy"])

    def identity(kv: KvIdentity) -> str:
        ready = EngineInfo(1000, 1000, 1000, 1, cpu_kv=CpuKvSize(1, 64, ("disk",)), kv_identity=kv)
        return kv_identity(config, ready)

    other = {int: 2, str: "another", bool: True}[type(getattr(KV, field))]

    assert identity(KV) == identity(KV)
    assert identity(msgspec.structs.replace(KV, **{field: other})) != identity(KV)


def test_any_changed_byte_of_the_weights_changes_the_hash(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(1000))
    before = file_hashes([weights], None)

    weights.write_bytes(bytes(500) + b"\1" + bytes(499))

    assert file_hashes([weights], None) != before


def test_hashes_of_files_that_have_not_changed_are_kept(tmp_path: Path) -> None:
    weights, cache = tmp_path / "model.safetensors", tmp_path / CACHE
    weights.write_bytes(bytes(1000))
    stat = weights.stat()
    before = file_hashes([weights], cache)
    cache.write_text(cache.read_text().replace(before[0], "kept"))

    assert file_hashes([weights], cache) == ["kept"]

    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert file_hashes([weights], cache) == before


def test_a_damaged_file_of_hashes_is_ignored(tmp_path: Path) -> None:
    weights, cache = tmp_path / "model.safetensors", tmp_path / CACHE
    weights.write_bytes(bytes(1000))
    for text in ("{", "[]", '{"a": 1}'):
        cache.write_text(text)

        assert file_hashes([weights], cache) == file_hashes([weights], None)
