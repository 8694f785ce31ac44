"""What the launcher prints for the operator."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Mapping, Sequence

from lightserve.config import ClusterConfig, HttpConfig
from lightserve.messages.control import EngineInfo, KvGroupSize, StartupPhase, StateKv
from lightserve.server.checks import ModelInfo
from lightserve.utils.logger import fields, init_logger, is_json
from lightserve.utils.terminal import CLEAR_LINE, Style

logger = init_logger("lightserve.launcher")

ONE_ENGINE = ClusterConfig()


def print_line(message: object, level: int = logging.INFO) -> None:
    """What happens to the server, in one line."""
    if is_json():
        logger.log(level, "%s", message)
        return
    style = Style(sys.stderr)
    prefix = style.paint("red", "lightserve:") if level >= logging.ERROR else "lightserve:"
    _print(f"{prefix} {message}", style)


def print_error(message: object) -> None:
    print_line(message, logging.ERROR)


def print_banner(url: str, rows: Mapping[str, str]) -> None:
    title = f"LightServe is ready at {url}"
    if is_json():
        logger.info(title, extra=fields(url=url, **{name.replace(" ", "_"): text for name, text in rows.items()}))
        return
    style = Style(sys.stderr)
    width = max(map(len, rows))
    lines = [style.paint("bold", title)]
    lines += [f"  {style.paint('dim', f'{name:{width}}')}  {text}" for name, text in rows.items()]
    _print("\n".join(lines), style)


def _print(text: str, style: Style) -> None:
    """On a terminal the text replaces the line that shows the progress of the start."""
    with contextlib.suppress(OSError, ValueError):  # a full disk or a closed pipe must not stop the server
        print((CLEAR_LINE if style.is_terminal else "") + text, file=sys.stderr, flush=True)


def banner(
    url: str,
    model: ModelInfo,
    engine: EngineInfo,
    http: HttpConfig,
    phases: Mapping[str, Sequence[StartupPhase]],
    cluster: ClusterConfig = ONE_ENGINE,
) -> dict[str, str]:
    """What runs, by name, for a server that is ready. ``phases`` are the start-up times of each process."""
    has_chat = not http.no_web and engine.pooling is None and cluster.listen is None
    rows = {"chat page": f"{url}/"} if has_chat else {}
    rows |= {
        "model": model.name,
        "computed as": " ".join((model.architecture, engine.dtype_and_device)),
        "longest request": f"{engine.max_req_total_len:,} tokens",
        "KV pool": f"{engine.max_total_token_num:,} tokens",
        "HTTP processes": str(http.num_processes),
    }
    if cluster.listen is not None:
        del rows["HTTP processes"]
    _add_cluster(rows, cluster)
    if engine.pooling is not None:
        rows["task"] = engine.pooling.summary
        if not engine.pooling.has_kv:
            del rows["KV pool"]
    if http.enable_rl:
        rows["trainer"] = _trainer(http)
    if engine.speculation:
        rows["speculation"] = engine.speculation
    for group in engine.kv_groups:
        rows["KV pool"] += f"; {_summary(group)}"
    if model.sampling_defaults and engine.pooling is None:
        rows["sampling defaults"] = f"{model.sampling_defaults} (of the model; --generation_config none ignores them)"
    for role, parts in phases.items():
        if parts:
            rows[role] = ", ".join(f"{phase.name} {phase.seconds:.2f} s" for phase in parts)
    return rows


def _trainer(http: HttpConfig) -> str:
    folders = "" if http.weights_dir is None else f", also from folders below {http.weights_dir}"
    who = "with an admin key" if http.admin_key else "everybody who reaches the port: there is no --admin_key"
    return f"may pause the server and replace its weights{folders}; {who}"


def _summary(group: KvGroupSize) -> str:
    if isinstance(group, StateKv):
        return f"states of {group.size:,} requests and prefixes"
    return f"{group.size:,} in layers with a window of {group.window:,} tokens"


def _add_cluster(rows: dict[str, str], cluster: ClusterConfig) -> None:
    if cluster.is_gateway:
        rows["KV pool"] += " in each engine"
        rows["engines"] = cluster.engines_file or ", ".join(cluster.engine_addresses)
    elif cluster.dp > 1:
        rows["KV pool"] += f" in {cluster.dp} engines"
    if cluster.nnodes > 1:
        rows["nodes"] = f"{cluster.nnodes}, connected at {cluster.master_addr}:{cluster.master_port}"
