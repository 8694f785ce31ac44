"""What trainers read of a server before they start: how many ranks it has, and how it computes."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.config import ServerConfig


@dataclass(frozen=True, slots=True)
class RlSettings:
    """Of the whole server, for the routes of --enable_rl."""

    tp: int = 1
    pp: int = 1
    dp: int | None = 1  # engines; None: a gateway asks them
    ranks: int = 1  # of an engine
    max_loras: int = 0
    max_lora_rank: int = 0
    model_path: str = ""


def settings_of(config: ServerConfig) -> RlSettings:
    worker = config.worker
    return RlSettings(
        worker.tp,
        worker.pp,
        None if config.cluster.is_gateway else config.cluster.dp,
        worker.num_ranks,
        worker.num_loras,
        worker.max_lora_rank,
        worker.model_dir or "",
    )
