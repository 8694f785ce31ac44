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
    KvContent,
    KvGroup,
    LayerSpec,
    ReplicatedWeight,
    TpPartBaseModel,
    VocabWeight,
    WeightContext,
    float_method_factory,
    norm_weight,
)
from lightserve.model_files.mtp import mtp_format
from lightserve.worker.speculation.heads.head import (
    OneLayerHead,
    OneLayerWeight,
    SampledAt,
    SampleLocal,
    lacks_embedding,
    with_images,
)

OF_MODEL = ("embed_tokens.weight", "shared_head.head.weight")  # copies of the model's


class MtpWeight(OneLayerWeight):
    def __init__(self, model: TpPartBaseModel, spec: LayerSpec, context: WeightContext) -> None:
        names, hidden = mtp_format(model.config), spec.hidden_size
        size = hidden, spec.norm_eps, context
        plain = replace(context, linear_method_factory=float_method_factory(model.config))
        self.embedding_norm = norm_weight(spec.norm, names.embedding_norm, *size)
        self.hidden_norm = norm_weight(spec.norm, names.hidden_norm, *size)
        self.projection = ReplicatedWeight([Block(names.projection, hidden)], 2 * hidden, plain)
        self.layer = model.transformer_weight_class(spec, context)
        self.norm = norm_weight(spec.norm, names.norm, *size)
        if lacks_embedding(model):
            config = model.config
            self.embedding = VocabWeight(model.spec.names.embedding, config.vocab_size, config.hidden_size, context)


class MtpHead(OneLayerHead):
    weights: MtpWeight

    def __init__(self, model: TpPartBaseModel) -> None:
        super().__init__(model)
        self.spec = model.mtp_layer_spec(mtp_format(model.config).layer)
        self.layer = model.transformer_layer_infer_class(self.spec, model.tp)
        self.needs_embedding = lacks_embedding(model)

    @property
    def embedding_name(self) -> str:
        return f"{self.model.spec.names.embedding}.weight"

    def new_weights(self, device: torch.device) -> MtpWeight:
        weights = MtpWeight(self.model, self.spec, self.model.weight_context(device))
        if self.model.uses_fixed_kv_scales:
            weights.layer.kv_scales = torch.ones(2 * self.kv_groups()[0].num_heads, device=device)
        return weights

    def kv_groups(self) -> tuple[KvGroup, ...]:
        """As that of a layer of the model, in the pool of all tokens: drafts have slots there."""
        specs, layout = self.model.layer_specs, self.model.model_kv_layout
        like = next(
            spec for spec in reversed(specs) if spec.num_kv_heads == self.spec.num_kv_heads and spec.mixer is None
        )
        group = layout.group_of(like.layer_num)
        assert group is not None
        key_parts = (group for group in layout.groups_of(KvContent.KEY_PARTS) if like.layer_num in group.layers)
        return tuple(replace(group, layers=(self.spec.layer_num,), window=None) for group in (group, *key_parts))

    def checkpoint(self, tensors: Iterable[CheckpointTensor]) -> Iterable[CheckpointTensor]:
        """Of several MTP layers those of the first one."""
        return self.model.adapt_checkpoint(tensor for tensor in tensors if self.reads(tensor.name))

    def reads(self, name: str) -> bool:
        prefix, layer = mtp_format(self.model.config).prefix, self.spec.prefix
        is_of_other_layer = name.startswith(f"{layer.rpartition('.')[0]}.") and not name.startswith(f"{layer}.")
        return name.startswith(prefix) and not is_of_other_layer and not name.endswith(OF_MODEL)

    def model_states(self, hidden: HiddenStates, final: Tensor) -> Tensor:
        return final

    def hidden(self, states: Tensor) -> Tensor:
        return states

    def layer_input(self, hidden: Tensor, token_ids: Tensor, state: InferStateInfo) -> Tensor:
        weights = self.weights
        table: VocabWeight = getattr(weights, "embedding", None) or self.model.pre_post_weight.embedding
        embedded = with_images(table.embed(token_ids), state.step)
        normed = weights.embedding_norm.norm(embedded), weights.hidden_norm.norm(hidden)
        return weights.projection.mm(torch.cat(normed, dim=-1))

    def recycled(self, output: Tensor, normed: Tensor) -> Tensor:
        return normed

    def sample(self, normed: Tensor, at: SampledAt, sample_local: SampleLocal) -> Tensor:
        return sample_local(self.model.logits_of(normed), at)
