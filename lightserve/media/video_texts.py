"""A video in the text of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.media.sizes import ImageSize
from lightserve.model_files.config.images import VideoTokens
from lightserve.model_files.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class VideoTexts:
    start: str
    placeholder: str
    end: str

    @classmethod
    def of(cls, tokenizer: Tokenizer, ids: VideoTokens | None) -> VideoTexts | None:
        texts = [] if ids is None else [tokenizer.id_to_token(token_id) or "" for token_id in ids]
        return cls(*texts) if texts and all(texts) else None

    @property
    def marker(self) -> str:
        """What the chat template writes for a video."""
        return self.start + self.placeholder + self.end

    def shown(self, placeholder: str, size: ImageSize) -> str:
        """In place of ``marker``. ``placeholder`` stands for a run of tokens.

        With texts, each run is between the two tokens, and its text before them.
        """
        if not size.texts:
            return self.start + placeholder * len(size.runs) + self.end
        return "".join(text + self.start + placeholder + self.end for text in size.texts)
