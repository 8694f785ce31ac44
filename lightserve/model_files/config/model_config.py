"""A model's ``config.json``, read once into typed fields. The launcher uses it too, so there is no torch here."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightserve.errors import ModelFilesError
from lightserve.model_files.config.layer_shapes import LayerShape, per_layer
from lightserve.model_files.config.names import with_common_names
from lightserve.model_files.quantization import QuantConfig, read_quant_config

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "longrope", "proportional", "yarn")
# Phi-3's first name for longrope; positions of Qwen-VL in three axes, which are the same for text
INTERLEAVED_AXES = ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")  # model_type of the whole model
ROPE_ALIASES = {"su": "longrope", "mrope": "default"}
# A config.json with larger values is damaged. These limits refuse it before anything of that size is built.
MAX_LAYERS = 10_000
MAX_SIZE = 2**24  # rows and columns: the largest vocabularies have 2**18
MAX_POSITION = 2**30
MAX_PAIRS = 2**15  # of a head, that rotate
MAX_NUMBER = 1e15
EXPERT_COUNT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts")  # of experts, in config.json
# values of layer_types
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
RECURRENT_TYPES = ("linear_attention", "conv")  # a recurrent mixer instead of attention
HYBRID = "hybrid"  # a recurrent mixer beside attention
LAYER_TYPES = (FULL_ATTENTION, SLIDING_ATTENTION, *RECURRENT_TYPES, HYBRID)
_OPTIONAL_ROPE = (
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions: the base, and how it is scaled past the trained length."""

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
    query_beta: float | None = None  # llama_4_scaling_beta: how fast the factor of queries grows with the position
    short_factor: tuple[float, ...] = ()  # longrope: of every frequency, up to the original length
    long_factor: tuple[float, ...] = ()  # longrope: past it
    trained_len: int = 1  # max_position_embeddings
    axes: tuple[
        int, ...
    ] = ()  # of each pair: whether it rotates by time (0), row (1) or column (2) of an image's token

    def rotary_dim(self, head_dim: int) -> int:
        """How many numbers of a head rotate. In a proportional rope all do, some of them by an angle of 0."""
        return head_dim if self.rope_type == "proportional" else int(head_dim * self.partial_rotary_factor)

    def factors(self, max_len: int) -> tuple[float, ...]:
        """longrope: of every frequency. Requests longer than the trained length need the long factors.

        The server's longest request decides for all of them, because a cached key must not depend on a request's
        length. No other rope type depends on it.
        """
        if self.rope_type != "longrope":
            return ()
        return self.long_factor if max_len > self.original_max_position else self.short_factor

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], layer_type: str = FULL_ATTENTION) -> RopeConfig:
        """Of the layers of ``layer_type``, if config.json has several kinds."""
        rope = _rope_table(hf, layer_type)
        rope_type = rope.get("rope_type") or rope.get("type") or "default"
        rope_type = ROPE_ALIASES.get(rope_type, rope_type) if isinstance(rope_type, str) else rope_type
        if rope_type not in ROPE_TYPES:
            text = reprlib.repr(rope_type)
            raise ModelFilesError(f"config.json: rope type {text} is not supported; supported: {ROPE_TYPES}")
        both = {**hf, **{key: value for key, value in rope.items() if value is not None}}
        max_position = _count(hf, "max_position_embeddings", default=1, most=MAX_POSITION)
        name, beta = "original_max_position_embeddings", "llama_4_scaling_beta"
        original = _count({name: hf.get(name) or rope.get(name) or max_position}, name, most=MAX_POSITION)
        is_given = bool(hf.get(name) or rope.get(name))
        if rope_type not in ("default", "proportional") and not rope.get("factor") and not is_given:
            raise ModelFilesError(f"config.json: rope type {rope_type!r} needs a factor")
        config = cls(
            rope_type=rope_type,
            theta=_number(both, "rope_theta", default=10000.0),
            partial_rotary_factor=_number(both, "partial_rotary_factor", default=1.0),
            factor=_number(rope, "factor", default=max_position / original if is_given else 1.0),
            original_max_position=original,
            truncate=_flag(rope, "truncate", default=True),
            query_beta=_number(rope, beta) if rope.get(beta) is not None else None,
            short_factor=_factors(rope, "short_factor"),
            long_factor=_factors(rope, "long_factor"),
            trained_len=max_position,
            axes=_axes(rope, _has_interleaved_axes(hf, rope)),
            **{key: _number(rope, key) for key in _OPTIONAL_ROPE if rope.get(key) is not None},
        )
        config._check()
        return config

    def _check(self) -> None:
        if self.theta <= 1 or self.partial_rotary_factor > 1 or self.high_freq_factor < self.low_freq_factor:
            raise ModelFilesError(
                f"config.json: rope_theta {self.theta}, partial_rotary_factor {self.partial_rotary_factor}, "
                f"low_freq_factor {self.low_freq_factor} and high_freq_factor {self.high_freq_factor} are "
                "inconsistent; fetch config.json again"
            )

    def check_factors(self, head_dim: int) -> None:
        for name, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            wanted = self.rotary_dim(head_dim) // 2
            if self.rope_type == "longrope" and len(factors) != wanted:
                raise ModelFilesError(
                    f"config.json: {name} has {len(factors)} values, wanted {wanted}; fetch config.json again"
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
    window: int | None  # sliding_window, if it is in effect; the model decides in which layers
    layer_types: tuple[str, ...] | None  # one of LAYER_TYPES for each layer; None: config.json has none
    hf: Mapping[str, Any]  # the whole config.json, for fields that only one model reads
    quantization: QuantConfig | None = None  # None: the weights are plain floats
    multimodal_type: str | None = None  # of the whole model, if only its language model is served
    is_of_transformers: bool = False  # transformers' modules compute it

    @classmethod
    def from_hf(cls, config_json: Mapping[str, Any]) -> ModelConfig:
        hf = with_common_names(config_json)
        num_heads = _count(hf, "num_attention_heads")
        hidden_size = _count(hf, "hidden_size")
        num_layers = _count(hf, "num_hidden_layers", most=MAX_LAYERS)
        config = cls(
            model_type=_first(hf, "model_type"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_count(hf, "num_key_value_heads", default=num_heads),
            head_dim=_count(hf, "head_dim", default=hidden_size // num_heads),
            hidden_size=hidden_size,
            intermediate_size=_count(hf, "intermediate_size", default=4 * hidden_size),
            vocab_size=_count(hf, "vocab_size"),
            norm_eps=_number(hf, "rms_norm_eps"),
            max_position=_count(hf, "max_position_embeddings", default=2048, most=MAX_POSITION),
            tie_word_embeddings=_flag(hf, "tie_word_embeddings"),
            rope=RopeConfig.from_hf(hf),
            window=_window(hf),
            layer_types=_layer_types(hf, num_layers),
            hf=hf,
            quantization=_quantization(hf),
            multimodal_type=hf.get("multimodal_type"),
        )
        config._check()
        return config

    def _check(self) -> None:
        for shape in self.layer_shapes:
            shape.check_heads()
        if self.hf.get("head_dim") is None and len({shape.num_heads for shape in self.layer_shapes} - {0}) > 1:
            raise ModelFilesError("config.json has layers with different numbers of heads, but no head_dim; add it")
        if self.hf.get("head_dim") is None and self.hidden_size % self.num_heads:
            raise ModelFilesError(
                f"config.json: hidden_size {self.hidden_size} does not divide among {self.num_heads} heads"
            )
        for head_dim in {*self.head_dims}:
            if self.rope.rotary_dim(head_dim) % 2:
                raise ModelFilesError(f"config.json: head_dim {head_dim} is odd, and rotary positions need pairs")
        if self.rope.rope_type == "dynamic" and self.rope.rotary_dim(self.head_dim) == 2:
            raise ModelFilesError("config.json: a dynamic rope needs more than one rotary pair")
        self.rope.check_factors(self.head_dim)

    @property
    def layer_shapes(self) -> list[LayerShape]:
        """Of every layer. The fields of the config are the largest values, if layers differ."""
        keys = {"num_attention_heads": self.num_heads, "num_key_value_heads": self.num_kv_heads}
        keys["intermediate_size"] = self.intermediate_size
        columns = [self._of_layers(key, default) for key, default in keys.items()]
        shapes = [LayerShape(*shape) for shape in zip(*columns, strict=True)]
        return [shape.without_attention() if self.is_recurrent(i) else shape for i, shape in enumerate(shapes)]

    @property
    def head_dims(self) -> list[int]:
        """Of every layer."""
        return self._of_layers("head_dim", self.head_dim)

    def _of_layers(self, key: str, default: int) -> list[int]:
        key = per_layer(key)
        values = self.hf.get(key)
        if values is None:
            return [default] * self.num_layers
        if not isinstance(values, list) or len(values) != self.num_layers:
            raise _bad_value((key,), values, f"a list of {self.num_layers} numbers")
        return [0 if value == 0 else _count({key: value}, key) for value in values]

    def flag(self, key: str, default: bool = False) -> bool:
        """A field that only some models have."""
        return _flag(self.hf, key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive field that only some models have."""
        return _number(self.hf, key, default=default)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer that only some models have."""
        return _count(self.hf, key, default=default)

    def count_or_0(self, key: str) -> int:
        """An integer that only some models have, and that may be 0."""
        return 0 if self.hf.get(key) in (None, 0) else _count(self.hf, key)

    def check_value(self, key: str, *supported: object) -> None:
        """Refuse a value that the model's code does not implement. A field that is not there passes."""
        value = self.hf.get(key)
        if value is not None and value not in supported:
            known = ", ".join(map(repr, supported))
            raise ModelFilesError(
                f"config.json: {key} {reprlib.repr(value)} is not supported for {self.model_type}; supported: {known}"
            )

    def optional_number(self, key: str) -> float | None:
        """A positive field that turns something on."""
        return None if self.hf.get(key) is None else _number(self.hf, key)

    def layer_type(self, layer_num: int) -> str:
        return FULL_ATTENTION if self.layer_types is None else self.layer_types[layer_num]

    def is_windowed(self, layer_num: int) -> bool:
        """Whether layer_types says that the layer attends to the sliding window only."""
        return self.layer_type(layer_num) == SLIDING_ATTENTION

    def is_recurrent(self, layer_num: int) -> bool:
        """Whether layer_types says that the layer has a recurrent mixer instead of attention."""
        return self.layer_type(layer_num) in RECURRENT_TYPES

    def has_state(self, layer_num: int) -> bool:
        """Whether layer_types says that the layer has a recurrent mixer."""
        return self.is_recurrent(layer_num) or self.layer_type(layer_num) == HYBRID

    @property
    def has_windows(self) -> bool:
        """Whether some layer attends to the sliding window only."""
        return self.window is not None and (self.layer_types is None or SLIDING_ATTENTION in self.layer_types)

    def window_of(self, layer_num: int) -> int | None:
        """The window of a layer, where all layers have it if config.json has no layer_types."""
        return self.window if self.layer_types is None or self.is_windowed(layer_num) else None

    @property
    def longest_position(self) -> int:
        """The most tokens of a request: the trained length, or the length that rope scaling extends it to.

        Less if attention is sparse beyond a length.
        """
        longest = max(self.max_position, int(self.rope.factor * self.rope.original_max_position))
        return longest if self.hf.get("dense_len") is None else min(longest, self.count("dense_len"))

    def request_len(self, wanted: int | None) -> int:
        """The most tokens of a request: the operator's limit, or the trained length."""
        if wanted is not None and wanted > self.longest_position:
            raise ModelFilesError(
                f"max_req_total_len={wanted}, but the model supports {self.longest_position} tokens; lower it"
            )
        return wanted or min(self.max_position, self.longest_position)

    @property
    def experts_name(self) -> str | None:
        """The name of the field that says how many experts there are; None: there are none."""
        return next((name for name in EXPERT_COUNT_NAMES if self.hf.get(name)), None)

    def check_tp(self, size: int) -> None:
        """Check that the ranks can split the shapes that every model has."""
        for shape in self.layer_shapes:
            shape.check_tp(size)


def _window(hf: Mapping[str, Any]) -> int | None:
    """The sliding window. Qwen2 and others set use_sliding_window to false and leave the number in place."""
    if hf.get("sliding_window") is None or not _flag(hf, "use_sliding_window", default=True):
        return None
    return _count(hf, "sliding_window", most=MAX_POSITION)


def _layer_types(hf: Mapping[str, Any], num_layers: int) -> tuple[str, ...] | None:
    types = hf.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        raise _bad_value(("layer_types",), types, f"a list of {num_layers} names")
    unknown = [name for name in types if name not in LAYER_TYPES]
    if unknown:
        raise ModelFilesError(
            f"config.json: layer type {reprlib.repr(unknown[0])} is not supported; supported: {', '.join(LAYER_TYPES)}"
        )
    return tuple(types)


def _rope_table(hf: Mapping[str, Any], layer_type: str) -> dict[str, Any]:
    """rope_scaling or rope_parameters; the latter may have a table for each layer type."""
    parameters = _table(hf, "rope_parameters")
    if layer_type in parameters:
        return _table(parameters, layer_type)
    return _table(hf, "rope_scaling") | parameters


def _axes(rope: Mapping[str, Any], is_interleaved: bool) -> tuple[int, ...]:
    """mrope_section: how many pairs rotate by each axis. Text has one position on all of them."""
    values = rope.get("mrope_section") or []
    if not isinstance(values, list) or len(values) not in (0, 3):
        raise _bad_value(("mrope_section",), values, "a list of three numbers")
    counts = [
        0 if value == 0 else _count({"mrope_section": value}, "mrope_section", most=MAX_PAIRS) for value in values
    ]
    if not is_interleaved:
        return tuple(axis for axis, count in enumerate(counts) for _ in range(count))
    # rows and columns take turns with time, until they have their pairs
    return tuple(pair % 3 if pair < 3 * counts[pair % 3] else 0 for pair in range(sum(counts)))


def _has_interleaved_axes(hf: Mapping[str, Any], rope: Mapping[str, Any]) -> bool:
    """transformers does not read the flag: it knows by the model."""
    return bool(rope.get("mrope_interleaved")) or hf.get("multimodal_type") in INTERLEAVED_AXES


def _factors(rope: Mapping[str, Any], key: str) -> tuple[float, ...]:
    values = rope.get(key) or []
    if not isinstance(values, list):
        raise _bad_value((key,), values, "a list of positive numbers")
    return tuple(_number({key: value}, key) for value in values)


def _quantization(hf: Mapping[str, Any]) -> QuantConfig | None:
    table = _table(hf, "quantization_config")
    return read_quant_config(table) if table else None


def _table(hf: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = hf.get(key) or {}
    if not isinstance(value, dict):
        raise _bad_value((key,), value, "an object")
    return value


def _count(hf: Mapping[str, Any], *keys: str, default: int | None = None, most: int = MAX_SIZE) -> int:
    value = _first(hf, *keys, default=default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise _bad_value(keys, value, f"a positive integer of at most {most}")
    return value


def _number(hf: Mapping[str, Any], *keys: str, default: float | None = None) -> float:
    value = _first(hf, *keys, default=default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < MAX_NUMBER:
        raise _bad_value(keys, value, "a positive number")
    return value


def _flag(hf: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = _first(hf, key, default=default)
    if not isinstance(value, bool):
        raise _bad_value((key,), value, "true or false")
    return value


def _bad_value(keys: tuple[str, ...], value: Any, wanted: str) -> ModelFilesError:
    return ModelFilesError(f"config.json: {keys[0]} is {reprlib.repr(value)}, wanted {wanted}; correct it")


def _first(hf: Mapping[str, Any], *keys: str, default: Any = None) -> Any:
    """The value of the first key that is present and not null."""
    for key in keys:
        if hf.get(key) is not None:
            return hf[key]
    if default is None:
        raise ModelFilesError(f"config.json has no {' or '.join(keys)}; fetch it again")
    return default
