"""Models in several GGUF files, with the names that llama-gguf-split gives them: ``NAME-00001-of-00003.gguf``."""

from __future__ import annotations

import re

_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def shard_names(name: str) -> list[str]:
    """The files of the model that ``name`` is a file of; only ``name`` if it is no shard."""
    match = _SHARD.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    return [f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)] or [name]


def is_later_shard(name: str) -> bool:
    """Whether it is a shard and not the first, which stands for the model."""
    return name != shard_names(name)[0]


def model_stem(name: str) -> str:
    """The name of the model, without that of a shard."""
    match = _SHARD.fullmatch(name)
    return name.removesuffix(".gguf") if match is None else match["stem"]
