"""The config of a model that transformers runs, with transformers' defaults. There is no torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightserve.errors import ModelFilesError, ServerError
from lightserve.model_files.config.model_config import MAX_SIZE, ModelConfig, RopeConfig
from lightserve.model_files.source import ModelSource
from lightserve.model_files.tokenizer.files.remote_code import without_torch
from lightserve.utils.extras import install_command

CAUSAL_LM = "AutoModelForCausalLM"
HAS_STATE = "it has recurrent state; only attention is served this way"
NO_INTERFACE = (
    "its attention does not go through transformers' AttentionInterface, so it cannot use a KV cache of this server"
)
# transformers computes these with the longest request of a step, so a request would change others
ROPES_OF_THE_STEP = ("dynamic", "longrope")


def is_installed() -> bool:
    return find_spec("transformers") is not None


def has_class(hf: Mapping[str, Any], trusts_code: bool) -> bool:
    """Whether transformers can make the model: it knows the model_type, or the folder's own code may run."""
    return is_installed() and (_is_known(hf) or (trusts_code and has_code(hf)))


def refusal_of_class(hf: Mapping[str, Any]) -> str | None:
    """Why a class of transformers cannot be served, as far as its code says without torch; None: nothing is known."""
    with without_torch():
        from transformers.models.auto.configuration_auto import model_type_to_module_name

        name = model_type_to_module_name(_own_type(hf))
        package = find_spec("transformers")
    if package is None or not package.submodule_search_locations:
        return None
    file = Path(package.submodule_search_locations[0], "models", *name.split("."), f"modeling_{name}.py")
    code = file.read_text(encoding="utf-8") if file.is_file() else ""
    if "_is_stateful = True" in code:
        return HAS_STATE
    return NO_INTERFACE if code and "_supports_attention_backend = True" not in code else None


def has_code(hf: Mapping[str, Any]) -> bool:
    """Whether the folder says that it contains the model's Python code."""
    auto_map = hf.get("auto_map")
    return isinstance(auto_map, dict) and CAUSAL_LM in auto_map


def _is_known(hf: Mapping[str, Any]) -> bool:
    with without_torch():
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        return _own_type(hf) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _own_type(hf: Mapping[str, Any]) -> str:
    return str(hf.get("multimodal_type") or hf.get("model_type"))


def runs_own_code(source: ModelSource) -> bool:
    """Whether the model's code is that of its folder. Code of transformers comes first."""
    return source.trusts_code and not _is_known(source.hf_config())


def read_auto_config(source: ModelSource) -> Any:
    """The config as an object of transformers."""
    if not is_installed():
        raise ServerError(f"--model_impl transformers needs the package transformers; run: {install_command('hf')}")
    if not (source.path / "config.json").is_file():
        raise ModelFilesError(f"{source.path}: --model_impl transformers needs a folder with safetensors files")
    with without_torch(), _errors_in_one_line(source):
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(source.path, trust_remote_code=runs_own_code(source), local_files_only=True)


def read_transformers_config(source: ModelSource) -> ModelConfig:
    """Raises ModelFilesError for what transformers cannot make, and for what cannot be served however it is made."""
    whole, hf = read_auto_config(source), source.hf_config()
    if whole.is_encoder_decoder:
        raise ModelFilesError(f"{source.path}: {_own_type(hf)} is an encoder and a decoder; only decoders are served")
    if hf.get("quantization_config"):
        raise ModelFilesError(
            f"{source.path}: the checkpoint is quantised; --model_impl transformers needs float weights"
        )
    if not has_class(hf, source.trusts_code):
        remedy = "read the folder's Python code, then set --trust_remote_code" if has_code(hf) else "choose another"
        raise ModelFilesError(f"{source.path}: transformers has no model class for {_own_type(hf)}; {remedy}")
    if not runs_own_code(source) and (reason := refusal_of_class(hf)):
        raise ModelFilesError(f"{source.path}: transformers cannot run {_own_type(hf)} here: {reason}")
    with _errors_in_one_line(source):
        return _model_config(whole.get_text_config(decoder=True), hf, _own_type(hf))


def _model_config(text: Any, hf: Mapping[str, Any], model_type: str) -> ModelConfig:
    hidden_size, num_heads = _count(text, "hidden_size"), _count(text, "num_attention_heads")
    longest = _longest_position(text)
    return ModelConfig(
        model_type=model_type,
        num_layers=_count(text, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_count(text, "num_key_value_heads", num_heads),
        head_dim=_count(text, "head_dim", max(hidden_size // num_heads, 1)),
        hidden_size=hidden_size,
        intermediate_size=_count(text, "intermediate_size", 4 * hidden_size),
        vocab_size=_count(text, "vocab_size"),
        norm_eps=1e-6,  # the model's modules know theirs
        max_position=longest,
        tie_word_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        rope=RopeConfig(trained_len=longest),
        window=None,  # its layers share one KV pool
        layer_types=None,
        hf=hf,
        is_of_transformers=True,
    )


def _longest_position(text: Any) -> int:
    longest = _count(text, "max_position_embeddings", most=2**30)
    table = getattr(text, "rope_parameters", None) or {}
    for rope in (table, *(value for value in table.values() if isinstance(value, dict))):
        if rope.get("rope_type") in ROPES_OF_THE_STEP:
            original = rope.get("original_max_position_embeddings") or longest
            longest = min(longest, int(original))
    return longest


def _count(text: Any, name: str, default: int | None = None, most: int = MAX_SIZE) -> int:
    value = getattr(text, name, None)
    value = default if value is None else value
    if not isinstance(value, int) or not 0 < value <= most:
        raise ModelFilesError(f"config.json: {name} is {value!r}, wanted a positive integer; correct it")
    return value


@contextmanager
def _errors_in_one_line(source: ModelSource) -> Iterator[None]:
    try:
        yield
    except ModelFilesError:
        raise
    except Exception as error:  # transformers and the folder's code may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ModelFilesError(f"{source.path}: transformers cannot read the config ({reason}); correct it") from error
