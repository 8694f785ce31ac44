"""The logprobs of a prompt in the formats of vLLM and OpenAI."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.httpserver.http.body import JsonObject
from lightserve.httpserver.openai.logprobs import CompletionLogprobs, Logprobs
from lightserve.messages.step import PromptLogprobs
from lightserve.model_files.tokenizer.tokenizer import Tokenizer
from lightserve.text.logprobs import PromptToken, finite_logprob, unpack_prompt_logprobs


@dataclass(frozen=True, slots=True)
class PromptLogprobsWriter:
    """Writes the logprobs of one prompt. ``packed`` comes with the first output token."""

    tokenizer: Tokenizer
    prompt_ids: list[int]
    echo: str = ""
    field_k: int | None = None  # alternatives in vLLM's field prompt_logprobs; None: not requested
    echo_k: int | None = None  # alternatives in the logprobs of an echoed prompt; None: not requested
    shows_ids: bool = False  # in the logprobs of an echoed prompt: see chat_logprobs

    def field(self, packed: PromptLogprobs | None) -> list[JsonObject | None] | None:
        """vLLM's field: for each token but the first, the logprobs of the token and its alternatives by their ids."""
        if self.field_k is None:
            return None
        return [self._entry(token, self.field_k) for token in unpack_prompt_logprobs(self.prompt_ids, packed)]

    def echoed(self, packed: PromptLogprobs | None) -> Logprobs | None:
        """OpenAI's logprobs of the echo, which precede the logprobs of the output."""
        if self.echo_k is None:
            return None
        return CompletionLogprobs(self.tokenizer, self.echo_k, shows_ids=self.shows_ids).of_prompt(
            unpack_prompt_logprobs(self.prompt_ids, packed), self.echo
        )

    def _entry(self, token: PromptToken, k: int) -> JsonObject | None:
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
