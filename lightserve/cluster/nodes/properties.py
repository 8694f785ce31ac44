"""What all nodes of an engine must have in common."""

from __future__ import annotations

from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version

from lightserve import __version__
from lightserve.config import ServerConfig
from lightserve.links.digest import model_digest, weights_digest
from lightserve.model_files.source import resolve

OWN_PATHS = {"model_dir", "quantization_config", "merge_lora", "kv_disk_dir"}  # a digest has the contents of most


def node_properties(config: ServerConfig) -> dict[str, str]:
    """By the name that an error shows. Ranks get commands that nobody translates between versions."""
    worker = config.worker
    source = resolve(worker.model_dir, needs_weights=False, trusts_code=worker.trust_remote_code)
    options = {f"--{one.name}": getattr(worker, one.name) for one in fields(worker) if one.name not in OWN_PATHS}
    options |= {"--nnodes": config.cluster.nnodes, "--null_worker": config.launch.null_worker}
    own = {
        "LightServe": __version__,
        "torch": _version("torch"),
        "config.json and tokenizer": model_digest(source),
        "weights and numeric flags": weights_digest(source, config),
    }
    return {name: str(value) for name, value in (options | own).items()}


def difference(node: int, theirs: dict[str, str], ours: dict[str, str]) -> str | None:
    """The first one, in words."""
    for name in ours | theirs:
        found, wanted = (one.get(name, "nothing") for one in (theirs, ours))
        if found != wanted:
            return f"node {node} has other properties than node 0: {name} is {found} there, and {wanted} on node 0"
    return None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
