"""Granite 4 H: Granite with Mamba2 in most layers, and with shared experts, perhaps beside others."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.common.ops import RouteSpec
from lightserve.errors import ModelFilesError
from lightserve.models.granite.model import GraniteTpPartModel
from lightserve.models.granitemoeshared.model import MOE_NAMES

INFINITY = {"__float__": "Infinity"}  # as transformers writes it
LAYER_NAMES = bm.LayerNames(gate_up="shared_mlp.input_linear", down="shared_mlp.output_linear")


class GraniteMoeHybridTpPartModel(GraniteTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config, spec = self.config, super().layer_spec(layer_num)
        shared_size = config.count("shared_intermediate_size")
        has_rope = config.hf.get("position_embedding_type") == "rope"
        return replace(
            spec,
            names=LAYER_NAMES,
            intermediate_size=shared_size,
            rope=spec.rope if has_rope else None,
            mixer=mamba2_of(config, expanded_width(config)) if config.is_recurrent(layer_num) else None,
            moe=self._moe(shared_size) if config.count_or_0("num_local_experts") else None,
        )

    def _moe(self, shared_size: int) -> bm.MoeSpec:
        return bm.MoeSpec(
            num_experts=bm.num_experts_of(self.config),
            intermediate_size=self.config.intermediate_size,
            route=RouteSpec(bm.top_k_of(self.config), renormalize=True),
            names=MOE_NAMES,
            layout=bm.ExpertsLayout.STACKED,
            shared_size=shared_size,
        )

    def _verify_params(self) -> None:
        super()._verify_params()
        self.config.check_value("hidden_act", "silu", "swish")  # the convolution's too
        self.config.check_value("position_embedding_type", "rope", "nope")


def mamba2_of(config: bm.ModelConfig, width: int) -> bm.Mamba2Spec:
    """As Bamba's config.json describes it; ``width``: of all heads together."""
    heads = config.count("mamba_n_heads")
    head_dim = width // heads if config.hf.get("mamba_d_head") in (None, "auto") else config.count("mamba_d_head")
    if heads * head_dim != width:
        raise ModelFilesError(f"config.json: {heads} heads of {head_dim} are not {width} channels; correct it")
    return bm.Mamba2Spec(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=config.count("mamba_n_groups"),
        state_dim=config.count("mamba_d_state"),
        conv_width=config.count("mamba_d_conv"),
        norm_eps=config.norm_eps,
        dt_limits=dt_limits(config),
        has_bias=config.flag("mamba_proj_bias"),
        has_out_bias=config.flag("mamba_proj_bias"),
        has_conv_bias=config.flag("mamba_conv_bias", default=True),
    )


def expanded_width(config: bm.ModelConfig) -> int:
    """Of all Mamba2 heads together."""
    return config.count("mamba_expand") * config.hidden_size


def dt_limits(config: bm.ModelConfig) -> tuple[float, float]:
    """The smallest and the largest step of a token."""
    limits = config.hf.get("time_step_limit") or [0.0, INFINITY]
    numbers = [float("inf") if limit == INFINITY else limit for limit in limits] if isinstance(limits, list) else []
    if len(numbers) != 2 or not all(isinstance(number, int | float) for number in numbers):
        raise ModelFilesError(f"config.json: time_step_limit is {limits!r}, wanted two numbers; correct it")
    return float(numbers[0]), float(numbers[1])
