"""DeepSeek V3.2 and GLM-5: DeepSeek V3 that attends to the few tokens that indexers in its layers choose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import Tensor

from lightserve.common import basemodel as bm, ops
from lightserve.errors import ModelFilesError
from lightserve.models.deepseek.model import DeepseekLayerInfer, DeepseekLayerWeight
from lightserve.models.deepseek_v32.indexer import IndexerWeight, SelectionStep, has_indexer, rotary_rows
from lightserve.models.deepseek_v32.infer_state import SparseInferState, is_dense
from lightserve.models.glm4_moe_lite.model import Glm4MoeLiteTpPartModel

KEY_NORM = (".indexer.k_norm.weight", ".indexer.k_norm.bias")


class SparseLayerWeight(DeepseekLayerWeight):
    def _init_attention(self, spec: bm.LayerSpec, context: bm.WeightContext) -> None:
        super()._init_attention(spec, context)
        self.indexer = IndexerWeight(spec, context) if has_indexer(spec.config, spec.layer_num) else None


class SparseLayerInfer(DeepseekLayerInfer):
    def _norm_and_qkv(
        self, input: Tensor, infer_state: bm.InferStateInfo, layer_weight: DeepseekLayerWeight
    ) -> tuple[Tensor, Tensor]:
        """Also choose the tokens, which needs the values between the projections."""
        assert isinstance(infer_state, SparseInferState)
        assert isinstance(layer_weight, SparseLayerWeight)
        if infer_state.is_dense or layer_weight.indexer is None:
            return super()._norm_and_qkv(input, infer_state, layer_weight)
        x = self._att_norm(input, infer_state, layer_weight)
        self._observe("att_norm", x, infer_state)
        q_a, latent = self._get_qkv(x, infer_state, layer_weight)
        q_a = layer_weight.q_a_norm.norm(q_a)
        angles, keys = infer_state.rotary_angles[self._rotary_key], infer_state.mem_manager.index_keys(self.layer_num)
        step = SelectionStep(infer_state.step.mem_index, infer_state.attn, infer_state.top_k)
        infer_state.slots = layer_weight.indexer.select(x, q_a, angles, keys, step)
        q = layer_weight.q_b_proj.mm(q_a)
        return q.view(len(q), self.num_heads, self.sizes.nope + self.sizes.rope), latent

    def _context_attention_kernel(
        self, q: Tensor, cache_kv: Tensor, infer_state: bm.InferStateInfo, layer_weight: DeepseekLayerWeight
    ) -> Tensor:
        assert isinstance(infer_state, SparseInferState)
        if infer_state.is_dense:
            return super()._context_attention_kernel(q, cache_kv, infer_state, layer_weight)
        kv_b, options = layer_weight.kv_b, layer_weight.attn_options
        cache = self._latent_cache(infer_state)
        sparse = infer_state.attend_to_chosen(q, cache, kv_b, options)
        dense = ops.latent_context_attention(q, cache_kv, cache, kv_b, infer_state.dense_attn, options)
        return infer_state.merged(sparse, dense)

    def _token_attention_kernel(
        self, q: Tensor, infer_state: bm.InferStateInfo, layer_weight: DeepseekLayerWeight
    ) -> Tensor:
        assert isinstance(infer_state, SparseInferState)
        if infer_state.is_dense:
            return super()._token_attention_kernel(q, infer_state, layer_weight)
        cache = self._latent_cache(infer_state)
        return infer_state.attend_to_chosen(q, cache, layer_weight.kv_b, layer_weight.attn_options)


class DeepseekV32TpPartModel(Glm4MoeLiteTpPartModel):
    transformer_weight_class = SparseLayerWeight
    transformer_layer_infer_class = SparseLayerInfer
    infer_state_class = SparseInferState

    def _kv_layout(self) -> bm.KvLayout:
        layout = super()._kv_layout()
        layers = tuple(i for i in range(self.config.num_layers) if has_indexer(self.config, i))
        size, content = self.config.count("index_head_dim"), bm.KvContent.INDEX_KEYS
        keys = bm.KvGroup(layers, 1, size, 0, self.args.dtype, content=content)
        return layout if is_dense(self.args) else replace(layout, groups=(*layout.groups, keys))

    def adapt_checkpoint(self, checkpoint: Iterable[bm.CheckpointTensor]) -> Iterator[bm.CheckpointTensor]:
        """Order the norm of keys as their rows are."""
        order = rotary_rows(self.config, 1)
        for tensor in super().adapt_checkpoint(checkpoint):
            if order is not None and tensor.name.endswith(KEY_NORM) and len(tensor.tensor) == order.total:
                tensor = tensor._replace(tensor=tensor.tensor[order.rows.to(tensor.tensor.device)])
            yield tensor

    def _verify_params(self) -> None:
        super()._verify_params()
        config = self.config
        config.count("q_lora_rank")  # the indexer reads what it projects to
        rotary, dim = config.count("qk_rope_head_dim"), config.count("index_head_dim")
        if dim < rotary:
            raise ModelFilesError(
                f"config.json: index_head_dim {dim} is less than qk_rope_head_dim {rotary}; correct it"
            )
        first = self.own_layer_specs[0].layer_num
        if not is_dense(self.args) and not has_indexer(config, first):
            raise ModelFilesError(
                f"a pipeline stage begins with layer {first}, which attends to the tokens that a layer before it "
                "chooses; use another --pp, or --tp"
            )
