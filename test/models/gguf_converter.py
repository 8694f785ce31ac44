"""Write a tiny model as llama.cpp's ``convert_hf_to_gguf.py`` does.

The steps below follow that script, not the reader: each turns tensors with the names of a Hugging Face folder into what
the script hands to the writer. The names in the file are those of the ``gguf`` package.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from test.model_files.files import add_to, finish
from test.models.architectures.case import Case, Json, Tensors, Tiny

Step = Callable[[Tensors, Json], Tensors]
KINDS = {"linear": "linear", "yarn": "yarn", "longrope": "longrope"}
MOST_LAYERS = 40
Q8_0 = gguf.GGMLQuantizationType.Q8_0
SAME_NAMES = {"deepseek32": "glm-dsa"}  # of an architecture that the package does not know yet
EXPERT_COUNT = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class GgufCase:
    """``metadata`` makes the metadata from config.json, without the architecture's prefix."""

    architecture: str
    case: Case
    metadata: Callable[[Json], Json]
    steps: tuple[Step, ...] = ()


def save(
    one: GgufCase,
    tiny: Tiny,
    path: Path,
    changes: Json | None = None,
    *,
    quantized: str | None = None,
    kind: gguf.GGMLQuantizationType = Q8_0,
) -> Path:
    """``changes`` are made to the metadata; None removes a key.

    ``quantized`` matches the names of matrices that are written as ``kind``, if their rows are whole blocks.
    """
    metadata = {**one.metadata(tiny.config_json), **(changes or {})}
    writer = gguf.GGUFWriter(path, one.architecture)
    for key, value in metadata.items():
        if value is not None:
            add_to(writer, f"{one.architecture}.{key}", value)
    for name, tensor in gguf_tensors(one, tiny).items():
        numbers = tensor.contiguous().numpy()
        if quantized is not None and re.search(quantized, name) and tensor.ndim > 1 and tensor.shape[-1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, numbers)
    return finish(writer, path)


def gguf_tensors(one: GgufCase, tiny: Tiny) -> Tensors:
    tensors = dict(tiny.tensors)
    for step in one.steps:
        tensors = step(tensors, tiny.config_json)
    return {_gguf_name(one.architecture, name): tensor for name, tensor in tensors.items() if "inv_freq" not in name}


def _gguf_name(architecture: str, name: str) -> str:
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    names = _name_map(architecture)
    for known in (name, name.removeprefix("transformer.")):
        found: str | None = names.get_name(known, try_suffixes=(".weight", ".bias"))
        if found is not None:
            return found
    return name  # of the file already


@lru_cache
def _name_map(architecture: str) -> gguf.TensorNameMap:
    kinds = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(kinds[SAME_NAMES.get(architecture, architecture)], MOST_LAYERS)


# metadata


def first(config: Json, *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def rope_table(config: Json) -> Json:
    rope: Json = first(config, "rope_parameters", "rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    return {"rope_theta": first(config, "rope_theta", "rotary_emb_base"), **rope}


def common(config: Json) -> Json:
    """What the script writes for every model, unless the model's class replaces it."""
    rope = rope_table(config)
    scoring = {"softmax": 1, "sigmoid": 2}
    return {
        "block_count": first(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers"),
        "context_length": first(config, "max_position_embeddings", "n_positions", "model_max_length"),
        "embedding_length": first(config, "hidden_size", "n_embd", "d_model"),
        "feed_forward_length": first(config, "intermediate_size", "n_inner"),
        "attention.head_count": first(config, "num_attention_heads", "n_head", "n_heads"),
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "attention.layer_norm_rms_epsilon": first(config, "rms_norm_eps", "norm_eps"),
        "attention.layer_norm_epsilon": first(config, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
        "rope.freq_base": as_float(rope["rope_theta"]),
        "rope.freq_base_swa": _local_theta(config),
        **_scaling(rope),
        "expert_count": first(config, *EXPERT_COUNT),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "expert_gating_func": scoring.get(config.get("scoring_func", "")),
    }


def _local_theta(config: Json) -> float | None:
    tables = config.get("rope_parameters") or {}
    return as_float((tables.get("sliding_attention") or {}).get("rope_theta"))


def _scaling(rope: Json) -> Json:
    kind = rope.get("rope_type")
    if kind not in KINDS:
        return {}
    fields: Json = {"rope.scaling.type": KINDS[kind]}
    if kind == "longrope":
        return fields
    fields["rope.scaling.factor"] = as_float(rope["factor"])
    if kind == "yarn":
        fields["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        fields["rope.scaling.yarn_beta_fast"] = as_float(rope.get("beta_fast"))
        fields["rope.scaling.yarn_beta_slow"] = as_float(rope.get("beta_slow"))
        fields["rope.scaling.yarn_attn_factor"] = as_float(rope.get("attention_factor"))
    return fields


def only(*keys: str) -> Callable[[Json], Json]:
    """Of classes that write their metadata without that of every model."""
    shape = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
    return lambda config: {key: value for key, value in common(config).items() if key in (*shape, *keys)}


def as_float(value: float | None) -> float | None:
    return None if value is None else float(value)


def head_dim(config: Json) -> int:
    hidden = first(config, "hidden_size", "n_embd", "d_model")
    heads = first(config, "num_attention_heads", "n_head", "n_heads")
    return int(config.get("head_dim") or hidden // heads)


def window_pattern(config: Json) -> Json:
    if config.get("sliding_window") is None:
        return {}
    kinds = config.get("layer_types")
    pattern = None if kinds is None else [kind == "sliding_attention" for kind in kinds]
    return {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": pattern}


# steps


def permute(tensor: Tensor, heads: int) -> Tensor:
    """From halves of the rotary dimensions to pairs."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def permute_qk(tensors: Tensors, config: Json) -> Tensors:
    kv_heads = first(config, "num_key_value_heads", "num_key_value_heads_per_layer")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": kv_heads}
    return {name: _permute_by(name, tensor, heads) for name, tensor in tensors.items()}


def _permute_by(name: str, tensor: Tensor, heads: dict[str, Any]) -> Tensor:
    layer = re.search(r"layers\.(\d+)\.", name)
    for part, count in heads.items():
        if f".{part}." in name and layer is not None:
            return permute(tensor, count[int(layer[1])] if isinstance(count, list) else count)
    return tensor


def stack_experts(tensors: Tensors, config: Json) -> Tensors:
    """One tensor for all experts; Mixtral's have the names of the original Mistral files."""
    done, stacks = dict[str, Tensor](), dict[str, list[Tensor]]()
    for name, tensor in sorted(tensors.items(), key=_expert_number):
        merged = re.sub(r"experts\.\d+\.", "experts.", name)
        if merged == name:
            done[name] = tensor
        else:
            stacks.setdefault(merged, []).append(tensor)
    return done | {name: torch.stack(experts) for name, experts in stacks.items()}


def _expert_number(item: tuple[str, Tensor]) -> int:
    found = re.search(r"experts\.(\d+)\.", item[0])
    return int(found[1]) if found else 0


def mixtral_names(tensors: Tensors, config: Json) -> Tensors:
    pattern = re.compile(r"model\.(layers\.\d+)\.block_sparse_moe\.experts")
    return {pattern.sub(r"\1.feed_forward.experts", name): tensor for name, tensor in tensors.items()}


def norms_plus_one(tensors: Tensors, config: Json) -> Tensors:
    return {name: tensor + 1 if name.endswith("norm.weight") else tensor for name, tensor in tensors.items()}


def without_lm_head(tensors: Tensors, config: Json) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}


def split_w_pack(tensors: Tensors, config: Json) -> Tensors:
    heads, done = config["num_attention_heads"], dict[str, Tensor]()
    for name, tensor in tensors.items():
        if "W_pack" not in name:
            done[name] = tensor
            continue
        q, k, v = tensor.chunk(3)
        parts = {"q_proj": permute(q, heads), "k_proj": permute(k, heads), "v_proj": v}
        done |= {name.replace("W_pack", part): value for part, value in parts.items()}
    return done


def split_wqkv(tensors: Tensors, config: Json) -> Tensors:
    """InternLM 2: each KV head comes behind its query heads."""
    heads, kv_heads, done = config["num_attention_heads"], config["num_key_value_heads"], dict[str, Tensor]()
    for name, tensor in tensors.items():
        if "wqkv" not in name:
            done[name] = tensor
            continue
        groups = tensor.reshape(kv_heads, heads // kv_heads + 2, -1, tensor.shape[-1])
        q, k, v = (part.reshape(-1, tensor.shape[-1]) for part in (groups[:, :-2], groups[:, -2], groups[:, -1]))
        prefix = name.replace("model.layers", "blk").removesuffix("attention.wqkv.weight")
        done |= {f"{prefix}attn_q.weight": permute(q, heads), f"{prefix}attn_k.weight": permute(k, kv_heads)}
        done[f"{prefix}attn_v.weight"] = v
    return done


def qkv_blocks(kv_heads: Callable[[Json], int]) -> Step:
    """All rows of q, of k and of v, instead of the q, k and v of each KV head."""

    def step(tensors: Tensors, config: Json) -> Tensors:
        heads, groups = first(config, "num_attention_heads", "n_head"), kv_heads(config)

        def regroup(tensor: Tensor) -> Tensor:
            rows = tensor.reshape(groups, heads // groups + 2, -1, *tensor.shape[1:])
            parts = (rows[:, :-2], rows[:, -2], rows[:, -1])
            return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])

        return {name: regroup(value) if "query_key_value" in name else value for name, value in tensors.items()}

    return step


def transpose_conv1d(tensors: Tensors, config: Json) -> Tensors:
    ends = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    return {name: value.transpose(1, 0) if name.endswith(ends) else value for name, value in tensors.items()}


def stack_head_norms(tensors: Tensors, config: Json) -> Tensors:
    done, stacks = dict[str, Tensor](), dict[str, dict[int, Tensor]]()
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(.*_layernorm)\.norms\.(\d+)\.weight", name)
        if found is None:
            done[name] = tensor
        else:
            stacks.setdefault(f"{found[1]}.weight", {})[int(found[2])] = tensor
    return done | {name: torch.stack([one[i] for i in range(len(one))]) for name, one in stacks.items()}


def split_kv_b(tensors: Tensors, config: Json) -> Tensors:
    """Keys and values of latent attention; keys are transposed."""
    nope, value, done = config["qk_nope_head_dim"], config["v_head_dim"], dict[str, Tensor]()
    for name, tensor in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            done[name] = tensor
            continue
        k, v = tensor.view(-1, nope + value, tensor.shape[-1]).split_with_sizes([nope, value], dim=1)
        done |= {name.replace("kv_b", "k_b"): k.transpose(1, 2), name.replace("kv_b", "v_b"): v}
    return done


def split_input_linear(tensors: Tensors, config: Json) -> Tensors:
    """Granite's experts have gate and up in one tensor."""
    done = dict[str, Tensor]()
    for name, tensor in tensors.items():
        found = re.match(r"model\.layers\.(\d+)\.block_sparse_moe\.input_linear", name)
        if found is None:
            done[name] = tensor
            continue
        gate, up = tensor.chunk(2, dim=-2)
        done |= {f"blk.{found[1]}.ffn_gate_exps.weight": gate, f"blk.{found[1]}.ffn_up_exps.weight": up}
    return done


def gpt_oss_experts(tensors: Tensors, config: Json) -> Tensors:
    """Matrices are transposed, and rows of gate and up alternate."""
    done = dict[str, Tensor]()
    for name, tensor in tensors.items():
        values = tensor if name.endswith("_bias") or "experts" not in name else tensor.transpose(-1, -2)
        name = name.replace("_proj_bias", "_proj.bias") if "experts" in name else name
        name = f"{name}.weight" if name.endswith(("sinks", "experts.down_proj", "gate_up_proj")) else name
        if "gate_up_proj" in name:
            done |= {name.replace("gate_up", "gate"): values[:, ::2], name.replace("gate_up", "up"): values[:, 1::2]}
        else:
            done[name] = values
    return done


def longrope_factors(tensors: Tensors, config: Json) -> Tensors:
    rope = rope_table(config)
    kinds = {f"rope_factors_{kind}.weight": rope.get(f"{kind}_factor") for kind in ("long", "short")}
    return tensors | {name: torch.tensor(factors) for name, factors in kinds.items() if factors}
