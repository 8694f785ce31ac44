"""Step 3.5: windows with more heads, a gate for each head, experts of DeepSeek V3 whose last layers are clamped."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.common.ops import GatedSilu, RouteSpec
from lightserve.errors import ModelFilesError
from lightserve.models.glm4_moe.model import is_sparse

EXPERT = bm.ExpertNames()
MAX_LIMIT = 1e6  # infinity and NaN are no limits
LAYER_NAMES = bm.LayerNames(head_gate="self_attn.g_proj")
MOE_NAMES = bm.MoeNames(router="moe.gate", score_bias="moe.router_bias", experts="moe.experts", shared="share_expert")
STACKED = tuple(f".moe.{linear}." for linear in (EXPERT.gate, EXPERT.up, EXPERT.down))


class Step3p5TpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config = self.config
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES,
            norm=bm.Norm.RMS_PLUS_ONE,
            rope=bm.RopeConfig.from_hf(config.hf, config.layer_type(layer_num)),
            window=config.window_of(layer_num),
            qk_norm=bm.QkNorm.HEAD,
            ffn_limit=self._limit("swiglu_limits_shared", layer_num),
            moe=self._moe(layer_num) if is_sparse(config, layer_num) else None,
        )

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), norm=bm.Norm.RMS_PLUS_ONE)

    def _moe(self, layer_num: int) -> bm.MoeSpec:
        config, limit = self.config, self._limit("swiglu_limits", layer_num)
        scale = config.number("moe_router_scaling_factor", default=1.0)
        return bm.MoeSpec(
            num_experts=bm.num_experts_of(config),
            intermediate_size=config.count("moe_intermediate_size"),
            route=RouteSpec(bm.top_k_of(config), "sigmoid", renormalize=True, scale=scale),
            names=MOE_NAMES,
            activation=GatedSilu(limit=limit, limits_activated=limit is not None),
            is_router_float32=True,
            has_score_bias=True,
            shared_size=config.count("share_expert_dim"),
            has_shared_apart=limit != self._limit("swiglu_limits_shared", layer_num),
        )

    def _limit(self, field: str, layer_num: int) -> float | None:
        """0 and null: there is none."""
        count = self.config.num_layers
        limits = self.config.hf.get(field) or [None] * count
        if not isinstance(limits, list) or len(limits) < count or not all(map(_is_limit, limits)):
            actual = reprlib.repr(limits)
            raise ModelFilesError(f"config.json: {field} is {actual}, wanted a list of {count} numbers; fetch it again")
        return limits[layer_num] or None

    def adapt_checkpoint(self, checkpoint: Iterable[bm.CheckpointTensor]) -> Iterator[bm.CheckpointTensor]:
        """Files have each linear of all experts in one tensor."""
        for tensor in super().adapt_checkpoint(checkpoint):
            linear = next((linear for linear in STACKED if linear in tensor.name), None)
            if linear is None:
                yield tensor
                continue
            for number, of_expert in enumerate(tensor.tensor):
                name = tensor.name.replace(".moe.", f".moe.experts.{number}.", 1)
                yield tensor._replace(name=name, tensor=of_expert)

    def _verify_params(self) -> None:
        config = self.config
        for field in ("attention_bias", "mlp_bias"):
            config.check_value(field, False)
        config.check_value("moe_router_activation", "sigmoid")
        for field in ("use_head_wise_attn_gate", "use_qk_norm", "use_moe_router_bias", "norm_expert_weight"):
            config.check_value(field, True)


def _is_limit(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and 0 <= value < MAX_LIMIT)
