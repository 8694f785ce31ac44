"""Any decoder of transformers: its own modules, with the attention and the KV cache of LightServe.

Slow: no fused kernels, no graphs, one device. It exists for models that have no class here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightserve.common import basemodel as bm
from lightserve.common.basemodel.pipeline import HiddenStateLink
from lightserve.errors import ServerError
from lightserve.models.transformers_backend.attention import (
    BACKEND,
    LayerAttention,
    Recorder,
    StepAttention,
    attending,
    register,
)
from lightserve.models.transformers_backend.check import check_logits
from lightserve.models.transformers_backend.head import Head
from lightserve.models.transformers_backend.loading import errors_in_one_line, load
from lightserve.models.transformers_backend.positions import check_positions

CANNOT_RELOAD = "the weights of a model that transformers runs cannot be replaced; start the server again"


class TransformersTpPartModel(bm.TpPartBaseModel):
    captures_graphs: ClassVar[bool] = False
    kv_dtypes: ClassVar[tuple[str, ...]] = ()

    def _init_specs(self) -> None:
        """The shapes of the config. What a layer computes is in transformers' modules."""
        config = self.config
        self.spec = bm.ModelSpec(config=config, norm_eps=config.norm_eps, is_tied=config.tie_word_embeddings)
        self.layer_specs = [
            bm.LayerSpec(
                config=config,
                layer_num=i,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                norm_eps=config.norm_eps,
                rope=None,
                scale=config.head_dim**-0.5,
            )
            for i in range(config.num_layers)
        ]
        self.own_layer_specs = self.layer_specs

    def _verify_must(self) -> None:
        args = self.args
        unsupported = {
            "several ranks": args.parallel.num_ranks > 1,
            f"kv_dtype {args.kv_dtype}": args.kv_dtype is not None,
            "LoRA adapters": args.lora is not None or args.merged_adapter is not None,
            "pooling": args.pooling is not None,
        }
        for name, is_set in unsupported.items():
            if is_set:
                raise ServerError(f"a model that transformers runs does not have {name}")

    def _init_weights(self) -> None:
        self.lora = None
        with errors_in_one_line(self._name):
            self.hf: Any = load(self.args)
            register()
            self.hf.set_attn_implementation(BACKEND)
            self.head = Head(self.hf)
            self.layers = self._recorded_layers()

    @property
    def _name(self) -> str:
        architectures = self.config.hf.get("architectures") or [self.config.model_type]
        return str(architectures[0])

    def load_weights(
        self, checkpoint: Iterable[bm.CheckpointTensor], report_missing: Callable[[int], None] = lambda count: None
    ) -> None:
        raise ServerError(CANNOT_RELOAD)

    def check_part(self, tensor_metadata: Iterable[bm.CheckpointTensor]) -> set[str]:
        raise ServerError(CANNOT_RELOAD)

    def _recorded_layers(self) -> dict[int, LayerAttention]:
        recorder = Recorder(self.args.max_req_total_len)
        count = min(4, self.args.max_req_total_len)
        ids = torch.arange(count, device=self.device) % self.config.vocab_size
        with attending(recorder), torch.inference_mode():
            self.head.decode(ids, torch.arange(count, device=self.device))
        if not recorder.layers:
            raise ServerError("none of its layers calls the attention of transformers' AttentionInterface")
        with attending(Recorder(self.args.max_req_total_len)):
            check_positions(self.head.decoder, self.config.vocab_size, self.device)
        return recorder.layers

    def _kv_layout(self) -> bm.KvLayout:
        """All layers share one pool: a window only hides tokens."""
        shapes: dict[tuple[int, int], list[int]] = {}
        for number, layer in sorted(self.layers.items()):
            shapes.setdefault((layer.num_kv_heads, layer.cache_size), []).append(number)
        return bm.KvLayout(
            tuple(
                bm.KvGroup(tuple(numbers), heads, size, size, self.args.dtype)
                for (heads, size), numbers in shapes.items()
            )
        )

    def _init_infer_layer(self) -> None:
        self.hidden_state_link = HiddenStateLink(self.pp, self.args.dtype, self.device)

    def _init_some_value(self) -> None:
        self.rotary_tables, self.query_scale_tables = {}, {}  # transformers' modules have their own

    def _init_custom(self) -> None:
        with errors_in_one_line(self._name):
            check_logits(self)

    @contextmanager
    def distinct_layers_only(self) -> Iterator[None]:
        """Layers cannot be left out: transformers' modules run them."""
        yield

    @torch.inference_mode()
    def hidden_states(self, step: bm.ModelInput) -> bm.HiddenStates:
        infer_state = self.infer_state_class(step, self.mem_manager)
        infer_state.observer = self.observer
        with attending(StepAttention(infer_state, self.layers, self.args.dtype)):
            return bm.HiddenStates(self.head.decode(step.input_ids, step.position_ids.long()), infer_state)

    @torch.inference_mode()
    def local_logits(self, hidden: bm.HiddenStates, rows: Tensor | None = None) -> Tensor:
        rows = hidden.infer_state.logit_rows() if rows is None else rows
        logits = self.head.logits(hidden.output if rows is None else hidden.output[rows])
        if self.observer is not None:
            self.observer.observe("logits", logits)
        return logits

    def gather_logits(self, local: Tensor) -> Tensor:
        return local

    @property
    def bytes_per_weight(self) -> float:
        return self.args.dtype.itemsize

    @property
    def fp8_share(self) -> float:
        return 0.0
