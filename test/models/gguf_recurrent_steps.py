"""The steps of llama.cpp's converter for models with recurrent layers."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from test.models.architectures.case import Json, Tensors
from test.models.gguf_converter import Step, stack_experts


def recurrent(tensors: Tensors, config: Json) -> Tensors:
    """What all classes do with small tensors."""
    done = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if name.endswith(".A_log"):
            tensor = -torch.exp(tensor)
        elif "conv1d.weight" in name or "conv.conv.weight" in name:
            tensor = tensor.squeeze(1)
        done[re.sub(r"\.dt_bias$", ".dt_proj.bias", name)] = tensor
    return done


def named_by_hand(*pairs: tuple[str, str]) -> Step:
    """For names that the package's table lacks: a pattern with the layer's number, and llama.cpp's name."""

    def step(tensors: Tensors, config: Json) -> Tensors:
        return {_renamed(name, pairs): tensor for name, tensor in tensors.items()}

    return step


def _renamed(name: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for pattern, target in pairs:
        match = re.fullmatch(rf"\w+\.layers\.(\d+)\.{pattern}", name)
        if match is not None:
            return f"blk.{match[1]}.{target}"
    return name


def mamba2(groups_of: Callable[[Json], int]) -> Step:
    """A and D get a dimension of 1, and the norm has one row for each group."""

    def step(tensors: Tensors, config: Json) -> Tensors:
        done = recurrent(tensors, config)
        for name, tensor in done.items():
            if name.endswith((".A_log", ".D")):
                done[name] = tensor.reshape(-1, 1)
            elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
                done[name] = tensor.reshape(groups_of(config), -1)
        return done

    return step


def qwen_norms(tensors: Tensors, config: Json) -> Tensors:
    return {
        name: tensor + 1 if name.endswith("norm.weight") and "linear_attn.norm" not in name else tensor
        for name, tensor in tensors.items()
    }


def split_qkvz(tensors: Tensors, config: Json) -> Tensors:
    """q, k and v of all key heads, and z."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_width = config["linear_key_head_dim"], values // keys * config["linear_value_head_dim"]
    done = dict[str, Tensor]()
    for name, tensor in tensors.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.linear_attn\.in_proj_qkvz\.weight", name)
        if match is None:
            done[name] = tensor
            continue
        columns = tensor.T.reshape(len(tensor.T), keys, -1)
        sizes = [key_dim, key_dim, value_width, value_width]
        q, k, v, z = (part.reshape(len(tensor.T), -1) for part in columns.split_with_sizes(sizes, dim=-1))
        done |= {
            f"blk.{match[1]}.attn_qkv.weight": torch.cat([q, k, v], dim=-1).T,
            f"blk.{match[1]}.attn_gate.weight": z.T,
        }
    return done


def tile_values(tensors: Tensors, config: Json) -> Tensors:
    """Value heads come in turn from every key head."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width = values * config["linear_value_head_dim"]

    def tile(tensor: Tensor) -> Tensor:
        heads = tensor.reshape(keys, values // keys, -1, *tensor.shape[1:])
        return heads.permute(1, 0, *range(2, heads.dim())).reshape(tensor.shape)

    def step(name: str, tensor: Tensor) -> Tensor:
        if "linear_attn." not in name or "linear_attn.norm" in name:
            return tensor
        if "in_proj_qkv" in name or "conv1d" in name:
            return torch.cat([tensor[:-width], tile(tensor[-width:])])
        return tile(tensor.T).T if "out_proj" in name else tile(tensor)

    return {name: step(name, tensor) for name, tensor in tensors.items()}


def split_shared_linear(tensors: Tensors, config: Json) -> Tensors:
    """Granite's shared expert; without other experts it is the feed-forward."""
    end = "_shexp" if config.get("num_local_experts") else ""
    done = dict[str, Tensor]()
    for name, tensor in tensors.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.shared_mlp\.(input|output)_linear\.weight", name)
        if match is None:
            done[name] = tensor
        elif match[2] == "output":
            done[f"blk.{match[1]}.ffn_down{end}.weight"] = tensor
        else:
            gate, up = tensor.chunk(2)
            done |= {f"blk.{match[1]}.ffn_gate{end}.weight": gate, f"blk.{match[1]}.ffn_up{end}.weight": up}
    return done


def falcon_h1_factors(tensors: Tensors, config: Json) -> Tensors:
    """Weights are multiplied with the factors of the config."""
    gate, down = config["mlp_multipliers"]
    attention = config["attention_in_multiplier"]
    factors = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": config["key_multiplier"] * attention,
        "q_proj": attention,
        "v_proj": attention,
        "o_proj": config["attention_out_multiplier"],
        "mamba.out_proj": config["ssm_out_multiplier"],
        "mamba.in_proj": config["ssm_in_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    done = dict[str, Tensor]()
    for name, tensor in tensors.items():
        factor = next((factor for part, factor in factors.items() if f".{part}." in f".{name}"), 1.0)
        done[name] = tensor * factor
        if "mamba.in_proj" in name:
            done[name] = done[name] * _part_factors(config)[:, None]
    return done


def _part_factors(config: Json) -> Tensor:
    width, groups = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = [width, width, groups, groups, config["mamba_n_heads"]]
    parts = zip(sizes, config["ssm_multipliers"], strict=True)
    return torch.cat([torch.full((size,), factor) for size, factor in parts])


def kimi_tensors(tensors: Tensors, config: Json) -> Tensors:
    """Convolutions have four dimensions, and A keeps those that it has."""
    done = dict[str, Tensor]()
    for name, tensor in stack_experts(tensors, config).items():
        if name.endswith("_conv1d.weight"):
            tensor = tensor.reshape(1, -1, 1, tensor.shape[-1])
        elif name.endswith(".A_log"):
            tensor = -torch.exp(tensor)
        done[re.sub(r"\.dt_bias$", ".dt_proj.bias", name)] = tensor
    return done
