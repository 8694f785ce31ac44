"""A model's ``config.json``, read once into names that the code uses everywhere. The launcher reads it: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightserve.errors import ModelFilesError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_OPTIONAL_ROPE = (
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions: the base and how it is stretched past the length the model was trained on."""

    rope_type: str = "default"
    theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> RopeConfig:
        rope = _table(hf, "rope_scaling") | _table(hf, "rope_parameters")
        rope_type = rope.get("rope_type") or rope.get("type") or "default"
        if rope_type not in ROPE_TYPES:
            raise ModelFilesError(f"config.json: rope type {rope_type!r} is not supported; supported: {ROPE_TYPES}")
        max_position = hf.get("max_position_embeddings", 0)
        original = hf.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        if rope_type != "default" and not rope.get("factor") and not original:
            raise ModelFilesError(f"config.json: rope type {rope_type!r} needs a factor")
        return cls(
            rope_type=rope_type,
            theta=rope.get("rope_theta") or hf.get("rope_theta") or 10000.0,
            partial_rotary_factor=rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0,
            factor=rope.get("factor") or (max_position / original if original else 1.0),
            original_max_position=original or max_position,
            **{key: rope[key] for key in _OPTIONAL_ROPE if rope.get(key) is not None},
        )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    max_position: int
    tie_word_embeddings: bool
    rope: RopeConfig
    hf: Mapping[str, Any]  # the whole config.json, for what only one model reads

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        if hf.get("quantization_config"):
            raise ModelFilesError(
                "config.json: quantised checkpoints are not supported yet; give the float one or a GGUF"
            )
        num_heads = _count(hf, "num_attention_heads", "n_head")
        hidden_size = _count(hf, "hidden_size", "n_embed")
        config = cls(
            model_type=_first(hf, "model_type"),
            num_layers=_count(hf, "num_hidden_layers", "n_layer"),
            num_heads=num_heads,
            num_kv_heads=hf.get("num_key_value_heads") or num_heads,
            head_dim=hf.get("head_dim") or hidden_size // num_heads,
            hidden_size=hidden_size,
            intermediate_size=hf.get("intermediate_size") or hf.get("n_inner") or 4 * hidden_size,
            vocab_size=_count(hf, "vocab_size"),
            norm_eps=_first(hf, "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
            max_position=hf.get("max_position_embeddings") or hf.get("seq_length") or 2048,
            tie_word_embeddings=hf.get("tie_word_embeddings", False),
            rope=RopeConfig.from_hf(hf),
            hf=hf,
        )
        config._check()
        return config

    def _check(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelFilesError(f"config.json: {self.num_kv_heads} KV heads do not divide {self.num_heads} heads")
        if int(self.head_dim * self.rope.partial_rotary_factor) % 2:
            raise ModelFilesError(f"config.json: head_dim {self.head_dim} is odd, and rotary turns pairs")

    @property
    def longest_position(self) -> int:
        """Tokens a request may have: what the model was trained on, or what its rope scaling stretches that to."""
        return max(self.max_position, int(self.rope.factor * self.rope.original_max_position))

    def request_len(self, wanted: int | None) -> int:
        """The longest request: what the operator wants, or what the model was made for."""
        if wanted is not None and wanted > self.longest_position:
            raise ModelFilesError(
                f"max_req_total_len={wanted}, but the model reaches {self.longest_position} tokens; lower it"
            )
        return wanted or self.max_position

    def check_tp(self, size: int) -> None:
        """The shapes that every model needs to divide among the ranks."""
        for what, count in (("attention heads", self.num_heads), ("FFN rows", self.intermediate_size)):
            if count % size:
                raise ModelFilesError(
                    f"{count} {what} do not divide among tp={size} ranks; choose a tp that divides them"
                )
        if self.num_kv_heads % size and size % self.num_kv_heads:
            raise ModelFilesError(f"{self.num_kv_heads} KV heads and tp={size}: one must divide the other")

    def kv_heads_of_rank(self, tp_size: int) -> int:
        """KV heads that each of ``tp_size`` ranks holds; ranks share a head when there are too few."""
        return max(self.num_kv_heads // tp_size, 1)


def _table(hf: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = hf.get(key) or {}
    if not isinstance(value, dict):
        raise ModelFilesError(f"config.json: {key} is {value!r}, wanted an object")
    return value


def _count(hf: Mapping[str, Any], *keys: str) -> int:
    value = _first(hf, *keys)
    if not isinstance(value, int) or value < 1:
        raise ModelFilesError(f"config.json: {keys[0]} is {value!r}, wanted a positive integer")
    return value


def _first(hf: Mapping[str, Any], *keys: str) -> Any:
    for key in keys:
        if hf.get(key) is not None:
            return hf[key]
    raise ModelFilesError(f"config.json has no {' or '.join(keys)}")
