"""Prompts whose tokens see later ones: what no chunk may divide, and who shares their KV."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from lightserve.messages.int_arrays import Int32s, int32s
from lightserve.messages.media import ImageItem, Sight
from lightserve.router.chunk_boundaries import NO_BOUNDARIES, ChunkBoundaries


@dataclass(frozen=True, slots=True)
class PromptSight:
    sight: Sight = Sight.NONE
    window: int | None = None  # tokens that see one another, at most; None: any number

    def boundaries(self, prompt_len: int, images: Sequence[ImageItem]) -> ChunkBoundaries:
        if self.sight is Sight.PROMPT:
            return ChunkBoundaries(spans=[(0, prompt_len)])
        if self.sight is Sight.IMAGE and images:
            spans = (span for image in images for span in image.spans)
            return ChunkBoundaries(spans=[(start, start + count) for start, count in spans])
        return NO_BOUNDARIES

    def salt(self, prompt_ids: Int32s) -> str:
        """The KV of a token depends on all that it sees: only equal prompts share any."""
        if self.sight is not Sight.PROMPT:
            return ""
        return f"prompt {hashlib.sha256(int32s(prompt_ids).tobytes()).hexdigest()} "

    def why_refused(self, prompt_len: int) -> str:
        """Why such a prompt cannot be computed; empty: it can. A window would hide some of it."""
        if self.sight is not Sight.PROMPT or self.window is None or prompt_len <= self.window:
            return ""
        return f"the prompt has {prompt_len} tokens; the limit is {self.window} (sliding_window of the model)"
