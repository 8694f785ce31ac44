"""What all nodes of a server must have in common."""

from __future__ import annotations

from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version

from lightserve import __version__
from lightserve.config import ServerConfig
from lightserve.links.digest import model_digest, weights_digest
from lightserve.model_files.source import resolve

OWN_PATHS = {"model_dir", "quantization_config", "merge_lora", "kv_disk_dir"}  # a digest has the contents of most

OF_CLUSTER = ("nnodes", "dp", "role", "kv_transport", "cluster_tls")


def node_properties(config: ServerConfig) -> dict[str, str]:
    """By the name that an error shows. Ranks get commands that nobody translates between versions."""
    worker = config.worker
    source = resolve(worker.model_dir, needs_weights=False, trusts_code=worker.trust_remote_code)
    options = {f"--{spec.name}": getattr(worker, spec.name) for spec in fields(worker) if spec.name not in OWN_PATHS}
    options |= {f"--{name}": getattr(config.cluster, name) for name in OF_CLUSTER}
    has_profiles = "off" if config.launch.profile_dir is None else "on"
    options |= {"--null_worker": config.launch.null_worker, "--profile_dir": has_profiles}
    properties = {
        "LightServe": __version__,
        "torch": _version("torch"),
        "config.json and tokenizer": model_digest(source),
        "weights and numeric flags": weights_digest(source, config),
    }
    return {name: str(value) for name, value in (options | properties).items()}


def difference(node: int, theirs: dict[str, str], ours: dict[str, str]) -> str | None:
    """The first one, in words."""
    for name in ours | theirs:
        actual, wanted = (properties.get(name, "nothing") for properties in (theirs, ours))
        if actual != wanted:
            return f"node {node} has other properties than node 0: {name} is {actual} there, and {wanted} on node 0"
    return None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
