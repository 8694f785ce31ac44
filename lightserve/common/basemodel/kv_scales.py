"""The scales that a checkpoint has for an fp8 KV cache: a number for the keys and one for the values of a layer.

Names end in ``k_scale`` and ``v_scale``, in ``kv_scale`` for both, or in ``k_proj.output_scale`` and so on. A head of
a layer without them has the scale 1. Scales for queries and for softmax weights belong to attention that multiplies in
fp8; attention here multiplies in 16 bits and does not need them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lightserve.common.basemodel.spec import LayerSpec
from lightserve.common.checkpoint.reader import CheckpointTensor
from lightserve.common.parallel import RankGroup
from lightserve.errors import CheckpointError
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

_NAME = re.compile(r"(?:^|\.)(?P<layer>\d+)\.(?:\w+\.)*?(?P<part>q|k|v|kv|prob)(?:_scale|_proj\.output_scale)$")
_PARTS = {"k": ("k",), "v": ("v",), "kv": ("k", "v")}


class KvScales:
    """Takes the scales out of a stream of tensors. ``is_fp8``: they are needed, and must be right."""

    def __init__(self, specs: Iterable[LayerSpec], is_fp8: bool) -> None:
        self._num_heads = {spec.layer_num: spec.num_kv_heads for spec in specs if spec.has_attention}
        self._is_fp8 = is_fp8
        self._found: dict[tuple[int, str], Tensor] = {}

    def removed_from(self, checkpoint: Iterable[CheckpointTensor]) -> Iterator[CheckpointTensor]:
        """All other tensors."""
        has_unused = False
        for entry in checkpoint:
            match = _NAME.search(entry.name)
            if match is None:
                yield entry
            elif self._is_fp8 and match["part"] in _PARTS:
                self._add(int(match["layer"]), match["part"], entry)
            else:
                has_unused = has_unused or match["part"] in _PARTS
        if has_unused:
            logger.info("the checkpoint has scales for an fp8 KV cache; --kv_dtype fp8 would use them")

    def of_layer(self, spec: LayerSpec, tp: RankGroup) -> Tensor:
        """``[2 * kv_heads]`` of this rank, keys first, in float32."""
        ones = torch.ones(spec.num_kv_heads)
        layer = spec.layer_num if spec.kv_source is None else spec.kv_source
        parts = [self._found.get((layer, kind), ones) for kind in ("k", "v")]
        heads = tp.part_of(spec.num_kv_heads)
        return torch.cat([scales.expand(spec.num_kv_heads)[heads] for scales in parts])

    def _add(self, layer: int, kind: str, entry: CheckpointTensor) -> None:
        heads = self._num_heads.get(layer)
        if heads is None:
            raise CheckpointError(f"{entry.file}: {entry.name} belongs to layer {layer}, which has no KV")
        if entry.tensor.numel() not in (1, heads) or not entry.tensor.is_floating_point():
            raise CheckpointError(
                f"{entry.file}: {entry.name} is {entry.tensor.dtype} of shape {tuple(entry.tensor.shape)}; "
                f"a KV scale is one float, or one for each of {heads} KV heads; set --kv_dtype to int8 or none"
            )
        if entry.tensor.is_meta:
            return
        scales = entry.tensor.detach().to("cpu", torch.float32).flatten().clone()
        if not all(0 < scale < math.inf for scale in scales.tolist()):
            raise CheckpointError(
                f"{entry.file}: {entry.name} is {scales.tolist()}; a KV scale is above 0 and finite; "
                "set --kv_dtype to int8 or none"
            )
        for name in _PARTS[kind]:
            self._found[layer, name] = scales
