"""Decides at the start whether requests may have images or sounds, and opens the memory of their embeddings."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from importlib.util import find_spec

from lightserve.config import ServerConfig
from lightserve.config.http import DEFAULT_MEDIA, NO_MEDIA
from lightserve.errors import ModelFilesError, OptionError
from lightserve.model_files.config.images import (
    PREPROCESSOR,
    has_image_files,
    read_image_files,
    reads_images,
    reads_sounds,
)
from lightserve.model_files.source import resolve
from lightserve.utils.drivers import DRIVERS, may_have_gpu
from lightserve.utils.extras import install_command
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

GIB, PAGE = 2**30, 4096
NOT_A_READER = "images and sounds of this model are not read here; leave it out"
OFF = "the operator wants none"


def with_images(config: ServerConfig) -> ServerConfig:
    """The config with the number of images or sounds that requests may have, if the model reads them.

    Without --limit_mm_per_prompt, a server that cannot read images serves text, and logs why.
    """
    if config.is_other_node:
        return config
    is_wanted = config.http.reads_media
    reason = "" if config.http.limit_mm_per_prompt is None or is_wanted else OFF
    reason = reason or _why_not(config)
    if not reason:
        return _with_limits(config)
    if is_wanted:
        raise OptionError(f"limit_mm_per_prompt={config.http.limit_mm_per_prompt!r}: {reason}")
    if reason not in (NOT_A_READER, OFF):
        logger.warning("requests may have no images or sounds: %s", reason)
    return replace(config, http=replace(config.http, limit_mm_per_prompt=None))


def _why_not(config: ServerConfig) -> str:
    source = resolve(config.worker.model_dir, needs_weights=False, trusts_code=config.worker.trust_remote_code)
    if not reads_images(source.hf_config()):
        return NOT_A_READER
    if not has_image_files(source):
        return f"{source.path} has no {PREPROCESSOR}; fetch it"
    if find_spec("PIL") is None and not reads_sounds(source.hf_config()):
        return f"the package pillow is missing; run: {install_command('images')}"
    from lightserve.media.layout import read_layout  # which may need Pillow

    try:
        _with_limits(config)
        read_layout(read_image_files(source), config.http.max_image_tokens)
    except (OptionError, ModelFilesError) as error:
        return str(error)
    return ""


def _with_limits(config: ServerConfig) -> ServerConfig:
    """Of the kinds that the model reads. It raises an OptionError if they do not combine with another feature."""
    hf = resolve(config.worker.model_dir, needs_weights=False, trusts_code=config.worker.trust_remote_code).hf_config()
    kinds = ("audio",) if reads_sounds(hf) else ("image", "video")
    given = config.http.media_limits if config.http.limit_mm_per_prompt else dict.fromkeys(kinds, DEFAULT_MEDIA)
    limits = {kind: given[kind] if kind in kinds else 0 for kind in NO_MEDIA}
    text = json.dumps(limits) if any(limits.values()) else None
    return replace(config, http=replace(config.http, limit_mm_per_prompt=text))


def open_arena(gib: float) -> int:
    """A descriptor of memory that the encoder and the workers share. Unused pages take nothing.

    It ends with the last process that has it.
    """
    if hasattr(os, "memfd_create"):  # no limit of /dev/shm counts, which is 64 MB in a container
        fd = os.memfd_create("lightserve-images")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, max(int(gib * GIB) // PAGE, 1) * PAGE)
    return fd


def has_own_memory(device: str | None) -> bool:
    """Whether --device may have memory that encoders and workers share. A check with torch would take seconds."""
    return may_have_gpu(device) or device not in (None, "cpu", *DRIVERS)
