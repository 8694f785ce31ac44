"""A prompt whose logprobs are asked for, in the shapes of those who ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightserve.httpserver.logprobs import PromptToken, finite_logprob, unpack_prompt_logprobs
from lightserve.httpserver.openai.logprobs import CompletionLogprobs, Logprobs
from lightserve.io_struct import PromptLogprobs
from lightserve.model_files.tokenizer import Tokenizer

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """``packed``, in its methods, is what came with the first token of an answer."""

    tokenizer: Tokenizer
    ids: list[int]
    echo: str = ""
    listed_k: int | None = None  # alternatives in vLLM's prompt_logprobs; None: it is not asked for
    echoed_k: int | None = None  # alternatives in the logprobs of an answer that begins with the prompt; None: likewise

    def listed(self, packed: PromptLogprobs | None) -> list[Object | None] | None:
        """As vLLM tells it: how likely each token and its alternatives were, by their ids; nothing of the first."""
        if self.listed_k is None:
            return None
        return [self._entry(token, self.listed_k) for token in unpack_prompt_logprobs(self.ids, packed)]

    def echoed(self, packed: PromptLogprobs | None) -> Logprobs | None:
        """As OpenAI tells it: what comes before the logprobs of the answer."""
        if self.echoed_k is None:
            return None
        return CompletionLogprobs(self.tokenizer, self.echoed_k).of_prompt(
            unpack_prompt_logprobs(self.ids, packed), self.echo
        )

    def _entry(self, token: PromptToken, k: int) -> Object | None:
        if token.logprob is None:
            return None
        ranked = {token.token_id: (token.logprob, token.rank)}
        for rank, (token_id, logprob) in enumerate(token.top[:k], start=1):
            ranked.setdefault(token_id, (logprob, rank))
        text_of = self.tokenizer.decoder.token_text
        return {
            str(token_id): {"logprob": finite_logprob(logprob), "rank": rank, "decoded_token": text_of(token_id)}
            for token_id, (logprob, rank) in ranked.items()
        }
