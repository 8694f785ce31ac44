"""The weights that Gemma 4 has beside those of other decoders."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightserve.common import basemodel as bm, ops


class PerLayerInputsWeight(bm.WeightGroup):
    """A second embedding of every token, with a part for each layer, and a projection of the first one that is added.

    The ranks split the rows of the table, which has half of the weights of Gemma 4 E2B. Each computes the rest.
    """

    def __init__(self, spec: bm.ModelSpec, context: bm.WeightContext) -> None:
        config = spec.config
        self._shape = config.num_layers, config.count("hidden_size_per_layer_input")
        self.image_id = config.count_or_0("pad_token_id")  # whose rows of the table the tokens of images have
        layers, size = self._shape
        vocab_size = config.count("vocab_size_per_layer_input")
        self._embedding_scale = rounded(size**0.5, context.dtype)
        self._projection_scale = config.hidden_size**-0.5
        self.embedding = bm.VocabWeight("model.embed_tokens_per_layer", vocab_size, layers * size, context)
        projection = bm.Block("model.per_layer_model_projection", layers * size)
        self.projection = bm.ReplicatedWeight([projection], config.hidden_size, context)
        self.norm = bm.RmsNormWeight("model.per_layer_projection_norm", size, spec.norm_eps, context)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        """``[tokens, layers, size]`` of tokens with these ids and embeddings ``x``, complete on every rank."""
        of_tokens = self.embedding.embed(ids).mul_(self._embedding_scale)
        projected = self.projection.mm(x).mul_(self._projection_scale)
        normed = self.norm.norm(projected.view(len(x), *self._shape))
        return normed.add_(of_tokens.view_as(normed)).mul_(2**-0.5)


class Gemma4PreAndPostWeight(bm.DecoderPreAndPostWeight):
    def _init_pre(self, spec: bm.ModelSpec, context: bm.WeightContext) -> None:
        super()._init_pre(spec, context)
        has_inputs = spec.config.count_or_0("hidden_size_per_layer_input") > 0
        self.per_layer_inputs = PerLayerInputsWeight(spec, context) if has_inputs else None


class PerLayerInputWeight(bm.WeightGroup):
    """What a layer adds to the hidden states from its own part of the per-layer inputs."""

    def __init__(self, spec: bm.LayerSpec, context: bm.WeightContext) -> None:
        size, at = spec.config.count("hidden_size_per_layer_input"), spec.prefix
        self._activation = bm.PLAIN_ACTIVATIONS[spec.activation]
        self.gate = bm.ReplicatedWeight([bm.Block(f"{at}.per_layer_input_gate", size)], spec.hidden_size, context)
        projection = bm.Block(f"{at}.per_layer_projection", spec.hidden_size)
        self.projection = bm.ReplicatedWeight([projection], size, context)
        norm = f"{at}.post_per_layer_input_norm"
        self.post_norm = bm.RmsNormWeight(norm, spec.hidden_size, spec.norm_eps, context)

    def forward(self, x: Tensor, per_layer_input: Tensor) -> Tensor:
        gated = self._activation(self.gate.mm(x)) * per_layer_input
        return self.post_norm.norm(self.projection.mm(gated))


class VectorWeight(bm.Weight):
    """A tensor with one dimension that every rank has. It is multiplied by ``factor`` when it is loaded."""

    def __init__(self, name: str, size: int, dtype: torch.dtype, device: torch.device, factor: float = 1.0) -> None:
        self._name, self._factor = name, factor
        self.tensor = torch.empty(size, dtype=dtype, device=device)

    def pieces(self) -> Iterator[bm.Piece]:
        yield bm.Piece(self._name, tuple(self.tensor.shape), self.tensor)

    def process_weights_after_loading(self) -> None:
        self.tensor *= self._factor


class Gemma4MoeWeight(bm.MoeFfnWeight):
    """Experts that read the hidden states of the layer: the router through one norm, the experts through another."""

    def __init__(self, spec: bm.LayerSpec, moe: bm.MoeSpec, context: bm.WeightContext) -> None:
        super().__init__(spec, moe, context)
        at, size, device = spec.prefix, spec.hidden_size, context.device
        self._eps = spec.norm_eps
        self.router_scale = VectorWeight(f"{at}.router.scale", size, torch.float32, device, factor=size**-0.5)
        self.expert_scales = VectorWeight(f"{at}.router.per_expert_scale", moe.num_experts, torch.float32, device)
        self.experts_norm = bm.RmsNormWeight(f"{at}.pre_feedforward_layernorm_2", size, self._eps, context)

    def _routed(self, x: Tensor, rows: bm.ExpertRows | None) -> Tensor:
        logits = self.router.mm(ops.rms_norm(x, self.router_scale.tensor, self._eps))
        ids, weights = self._choose(logits, None, rows)
        weights = weights * self.expert_scales.tensor[ids.clamp(min=0).long()]  # the weights of padding are 0
        return self.experts.partial_forward(self.experts_norm.norm(x), ids, weights)


class Gemma4LayerWeight(bm.DecoderLayerWeight):
    def __init__(self, spec: bm.LayerSpec, context: bm.WeightContext) -> None:
        super().__init__(spec, context)
        at, norm = spec.prefix, (spec.hidden_size, spec.norm_eps, context)
        self.v_norm = torch.ones(spec.head_dim, dtype=context.dtype, device=context.device)  # no weight of a checkpoint
        self.layer_scalar = VectorWeight(f"{at}.layer_scalar", 1, context.dtype, context.device)
        has_input = spec.config.count_or_0("hidden_size_per_layer_input") > 0
        self.per_layer_input = PerLayerInputWeight(spec, context) if has_input else None
        self.moe = None if spec.moe is None else Gemma4MoeWeight(spec, spec.moe, context)
        if spec.moe is not None:
            self.dense_post_norm = bm.RmsNormWeight(f"{at}.post_feedforward_layernorm_1", *norm)
            self.moe_post_norm = bm.RmsNormWeight(f"{at}.post_feedforward_layernorm_2", *norm)


def rounded(value: float, dtype: torch.dtype) -> float:
    """As the factors of embeddings were in training."""
    return torch.tensor(value, dtype=dtype).item()
