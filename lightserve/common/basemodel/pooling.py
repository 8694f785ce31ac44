"""One vector for each text of a step, from the hidden states of its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lightserve.common.basemodel.spec import LayerNames, ModelNames
from lightserve.common.checkpoint.reader import CheckpointTensor
from lightserve.common.ops import AttnBatch


class Pooler:
    """Pools the tokens of each request of a step. A text may come in chunks: then the last step has its result.

    ``kind`` is cls (the first token), mean, max or last; or tokens: each has its result, and texts come whole.
    """

    def __init__(self, kind: str, hidden_size: int, num_rows: int, device: torch.device) -> None:
        """``num_rows``: of ``req_to_token``; a request keeps its row from chunk to chunk."""
        self.kind = kind
        shape = (0 if kind in ("last", "tokens") else num_rows, hidden_size)
        self._before = torch.zeros(shape, dtype=torch.float32, device=device)  # by row: of the chunks before

    def rows(self, attn: AttnBatch) -> Tensor | None:
        """The tokens of the step that count; None: all of them."""
        if self.kind == "last":
            return (attn.b_start_loc + attn.b_seq_len - attn.b_ready_cache_len - 1).long()
        return attn.b_start_loc.long() if self.kind == "cls" else None

    def pool(self, states: Tensor, attn: AttnBatch) -> Tensor:
        """``states``: of ``rows``. Returns ``[requests, hidden]`` in float32, or ``[tokens, hidden]``."""
        if self.kind in ("last", "tokens"):
            return states.float()
        table_rows = attn.b_req_idx.long()
        is_first = (attn.b_ready_cache_len == 0)[:, None]
        before = self._before.index_select(0, table_rows)
        pooled = self._join(states, attn, before, is_first)
        self._before.index_copy_(0, table_rows, pooled)
        return pooled / attn.b_seq_len[:, None] if self.kind == "mean" else pooled

    def _join(self, states: Tensor, attn: AttnBatch, before: Tensor, is_first: Tensor) -> Tensor:
        """This chunk and the chunks before: the first token, the sum or the maximum."""
        if self.kind == "cls":
            return torch.where(is_first, states.float(), before)
        lengths = (attn.b_seq_len - attn.b_ready_cache_len).long()
        if self.kind == "mean":
            sums = torch.segment_reduce(states.float(), "sum", lengths=lengths, axis=0, unsafe=True)
            return torch.where(is_first, sums, before + sums)
        peaks = torch.segment_reduce(states.float(), "max", lengths=lengths, axis=0, unsafe=True)
        return torch.where(is_first, peaks, torch.maximum(before, peaks))


def with_outer_prefix(
    checkpoint: Iterable[CheckpointTensor], names: ModelNames, layer_names: LayerNames
) -> Iterator[CheckpointTensor]:
    """Add the part before the first dot of the model's names to tensors that lack it, such as ``layers.0...``."""
    outer, dot, _ = names.embedding.partition(".")
    paths = (names.embedding, names.final_norm or "", layer_names.layers)
    inner = {path.split(".")[1] for path in paths if dot and path.startswith(f"{outer}.")}
    for name, tensor, file in checkpoint:
        is_bare = name.partition(".")[0] in inner
        yield CheckpointTensor(f"{outer}.{name}" if is_bare else name, tensor, file)
