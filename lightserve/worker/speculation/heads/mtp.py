"""MTP: the layer of a checkpoint that was trained to predict the token after the next one.

It reads the hidden state behind the model's last norm, and recycles what is behind its own. Embedding and head are
those of the model. A checkpoint with several such layers drafts with the first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from lightserve.common.basemodel import (
    Block,
    CheckpointTensor,
    HiddenStates,
    InferStateInfo,
    KvGroup,
    LayerSpec,
    NormWeight,
    ReplicatedWeight,
    RmsNormWeight,
    TpPartBaseModel,
    WeightContext,
    float_method_factory,
)
from lightserve.worker.speculation.heads.head import DraftHead, HeadWeight, SampledAt, SampleLocal

OF_MODEL = ("embed_tokens.weight", "shared_head.head.weight")  # copies of the model's


class MtpWeight(HeadWeight):
    def __init__(self, model: TpPartBaseModel, spec: LayerSpec, context: WeightContext) -> None:
        at, hidden, norm = spec.prefix, spec.hidden_size, (spec.norm_eps, context)
        plain = replace(context, linear_method_factory=float_method_factory(model.config))
        self.embedding_norm: NormWeight = RmsNormWeight(f"{at}.enorm", hidden, *norm)
        self.hidden_norm: NormWeight = RmsNormWeight(f"{at}.hnorm", hidden, *norm)
        self.projection = ReplicatedWeight([Block(f"{at}.eh_proj", hidden)], 2 * hidden, plain)
        self.layer = model.transformer_weight_class(spec, context)
        self.norm = RmsNormWeight(f"{at}.shared_head.norm", hidden, *norm)


class MtpHead(DraftHead):
    weights: MtpWeight

    def __init__(self, model: TpPartBaseModel) -> None:
        super().__init__(model)
        self.spec = replace(model.layer_specs[-1], layer_num=model.config.num_layers)
        self.layer = model.transformer_layer_infer_class(self.spec, model.tp)

    def new_weights(self, device: torch.device) -> MtpWeight:
        weights = MtpWeight(self.model, self.spec, self.model.weight_context(device))
        if self.model.args.kv_dtype == "fp8":
            weights.layer.kv_scales = torch.ones(2 * self.kv_group().num_heads, device=device)
        return weights

    def kv_group(self) -> KvGroup:
        group = self.model.model_kv_layout.group_of(self.model.config.num_layers - 1)
        assert group is not None
        return replace(group, layers=(self.spec.layer_num,))

    def checkpoint(self, tensors: Iterable[CheckpointTensor]) -> Iterable[CheckpointTensor]:
        prefix = f"{self.spec.prefix}."
        mine = (tensor for tensor in tensors if tensor.name.startswith(prefix))
        return self.model.adapt_checkpoint(tensor for tensor in mine if not tensor.name.endswith(OF_MODEL))

    def model_states(self, hidden: HiddenStates, final: Tensor) -> Tensor:
        return final

    def hidden(self, states: Tensor) -> Tensor:
        return states

    def layer_input(self, hidden: Tensor, token_ids: Tensor, state: InferStateInfo) -> Tensor:
        weights = self.weights
        embedded = self.model.pre_post_weight.embedding.embed(token_ids)
        normed = weights.embedding_norm.norm(embedded), weights.hidden_norm.norm(hidden)
        return weights.projection.mm(torch.cat(normed, dim=-1))

    def recycled(self, summed: Tensor, normed: Tensor) -> Tensor:
        return normed

    def sample(self, normed: Tensor, at: SampledAt, sample_local: SampleLocal) -> Tensor:
        return sample_local(self.model.logits_of(normed), at)
