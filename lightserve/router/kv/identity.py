"""What the KV of a server depends on, besides tokens, salt and adapter. Stored KV is used only if that is the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import msgspec

from lightserve.config import ServerConfig
from lightserve.links.digest import weights_digest
from lightserve.messages.control import EngineInfo
from lightserve.model_files.lora.paths import adapter_files
from lightserve.model_files.source import resolve

READ_BYTES = 1 << 22
HASHERS = 8  # files that are read at once
CACHE = "weights.json"  # in --kv_disk_dir: hashes of files that have not changed since


def kv_identity(config: ServerConfig, engine: EngineInfo) -> str:
    """Empty if no KV outlives the workers. It reads all weights."""
    if engine.cpu_kv is None or not engine.cpu_kv.storage_tiers:
        return ""
    worker = config.worker
    source = resolve(worker.model_dir, needs_weights=worker.load_format == "auto")
    files = [] if worker.load_format == "dummy" else source.weight_files()
    if worker.merge_lora is not None:
        files = [*files, *adapter_files(Path(worker.merge_lora))]
    cache = None if worker.kv_disk_dir is None else Path(worker.kv_disk_dir) / CACHE
    parts = {
        "computed": msgspec.to_builtins(engine.kv_identity),
        "options": weights_digest(source, config),
        "weights": file_hashes(files, cache),
    }
    return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=32).hexdigest()


def file_hashes(files: Sequence[Path], cache: Path | None) -> list[str]:
    """Of the whole content of each file: a sample would miss weights that were changed in place."""
    known = _read_cache(cache)
    stamps = [_stamp(path) for path in files]
    with ThreadPoolExecutor(HASHERS) as threads:
        pairs = zip(stamps, files, strict=True)
        hashes = list(threads.map(lambda pair: known.get(pair[0]) or _hash(pair[1]), pairs))
    if cache is not None:
        _write_cache(cache, dict(zip(stamps, hashes, strict=True)))
    return hashes


def _stamp(path: Path) -> str:
    stat = path.stat()
    return f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"


def _hash(path: Path) -> str:
    digest = blake2b(digest_size=32)
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _read_cache(cache: Path | None) -> dict[str, str]:
    if cache is None:
        return {}
    try:
        known = json.loads(cache.read_text())
    except (OSError, ValueError):  # it is missing or damaged: hash again
        return {}
    return known if isinstance(known, dict) and all(isinstance(digest, str) for digest in known.values()) else {}


def _write_cache(cache: Path, hashes: dict[str, str]) -> None:
    temporary = cache.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps(hashes))
        temporary.replace(cache)
    except OSError:  # the next start hashes again
        temporary.unlink(missing_ok=True)
