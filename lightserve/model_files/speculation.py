"""What --speculative_config means for a model: which method ``auto`` is, and where the files of a draft head are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from lightserve.config import WorkerConfig
from lightserve.config.speculation import DEFAULT_DRAFTS_OF, DEFAULT_HEAD_DRAFTS, MAX_DRAFTS, SpeculativeConfig
from lightserve.errors import ModelFilesError, OptionError
from lightserve.model_files.config.model_config import ModelConfig
from lightserve.model_files.dflash import DFlashConfig
from lightserve.model_files.draft_head import SPECULATORS_TYPE, Eagle3Config
from lightserve.model_files.draft_model import draft_model_path
from lightserve.model_files.folder import read_json_if_exists
from lightserve.model_files.mtp import check_mtp, mtp_format, promises_mtp
from lightserve.model_files.safetensors_header import read_header
from lightserve.model_files.source import FolderSource, ModelSource, require_weights, resolve

HEAD_ARCHITECTURES = ("LlamaForCausalLMEagle3", "DFlashDraftModel")  # of heads in their original formats


def resolved_speculation(worker: WorkerConfig, source: ModelSource, model: ModelConfig) -> WorkerConfig:
    """The config with a method, or none, in place of ``auto`` and a local folder in place of a head's name.

    Raises an OptionError for a head that does not fit the model, before anything loads.
    """
    config = worker.speculation
    if config is None:
        return worker
    if config.method == "auto":
        may_have_head = worker.num_groups == 1 and not model.is_of_transformers  # see config/combinations.py
        if not may_have_head or not has_mtp(source, model):
            return replace(worker, speculative_config=None)  # n-grams cost time on a GPU where nothing repeats
        config = SpeculativeConfig("mtp", DEFAULT_HEAD_DRAFTS)
    if config.method == "mtp":
        check_mtp(model)
    if config.method in ("eagle3", "dflash"):
        config = _with_head(config, model, worker.load_format == "auto")
    if config.method == "dflash":
        _check_block(config.num_speculative_tokens + 1, model.request_len(worker.max_req_total_len))
    if config.method == "draft_model":
        path = draft_model_path(config.model, source, model, worker.load_format == "auto")
        config = msgspec.structs.replace(config, model=path)
    return replace(worker, speculative_config=config.text)


def has_mtp(source: ModelSource, model: ModelConfig) -> bool:
    """Whether the checkpoint has an MTP layer that can draft. Some lack the one that config.json promises."""
    if not promises_mtp(model) or not isinstance(source, FolderSource):
        return False
    try:
        files = source.weight_files()
    except ModelFilesError:
        return True  # they are not downloaded yet
    name = f"{mtp_format(model).projection}.weight"
    return any(name in read_header(file) for file in files if file.suffix == ".safetensors")


def _with_head(config: SpeculativeConfig, model: ModelConfig, needs_weights: bool) -> SpeculativeConfig:
    files = resolve(config.model, needs_weights=False)
    num_drafts = config.num_speculative_tokens
    if config.method == "dflash":
        num_drafts = min(num_drafts, DFlashConfig.read(files.path, model).block_size - 1)
    else:
        Eagle3Config.read(files.path, model)
    if needs_weights:
        require_weights(files)
    return msgspec.structs.replace(config, model=str(files.path), num_speculative_tokens=num_drafts)


def _check_block(tokens: int, longest: int) -> None:
    """``longest``: the most tokens of a request."""
    if tokens > longest:
        problem = f"a block has {tokens} tokens, and a request at most {longest}"
        raise OptionError(f"speculative_config: {problem}; raise --max_req_total_len or lower num_speculative_tokens")


def served_with_head(worker: WorkerConfig) -> WorkerConfig:
    """If --model_dir is a draft head in the ``speculators`` format, the config that serves its model with it."""
    if worker.model_dir is None:
        return worker
    source = resolve(worker.model_dir, needs_weights=False)
    hf = read_json_if_exists(source.path / "config.json") if source.path.is_dir() else {}
    if SPECULATORS_TYPE not in hf and (hf.get("architectures") or [""])[0] not in HEAD_ARCHITECTURES:
        return worker
    if worker.speculative_config is not None:
        raise OptionError(
            f"model_dir={worker.model_dir!r} is a draft head, which is served with its model, and speculative_config "
            "is set too; leave out one of them"
        )
    speculators: dict[str, Any] = hf.get("speculators_config") or {}
    verifier = (speculators.get("verifier") or {}).get("name_or_path")
    if not isinstance(verifier, str) or not verifier:
        raise OptionError(
            f"model_dir={worker.model_dir!r} is a draft head, and its config.json does not name the model "
            "(speculators_config.verifier.name_or_path); set --model_dir to the model, and the head as "
            "--speculative_config"
        )
    method = "dflash" if hf.get(SPECULATORS_TYPE) == "dflash" else "eagle3"
    config = SpeculativeConfig(method, _num_drafts(speculators, method), model=str(source.path))
    return replace(worker, model_dir=verifier, speculative_config=config.text)


def _num_drafts(speculators: dict[str, Any], method: str) -> int:
    """Of the default proposal method, or of the first."""
    methods = [method for method in speculators.get("proposal_methods") or [] if isinstance(method, dict)]
    default = speculators.get("default_proposal_method")
    chosen = next((method for method in methods if method.get("proposal_type") == default), next(iter(methods), {}))
    count = chosen.get("speculative_tokens")
    if not isinstance(count, int) or count < 1:
        return DEFAULT_DRAFTS_OF.get(method, DEFAULT_HEAD_DRAFTS)
    return min(count, MAX_DRAFTS)
