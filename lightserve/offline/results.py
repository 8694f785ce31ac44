"""What an LLM generates."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightserve.messages.output import RequestDrafts
from lightserve.messages.params import FinishReason
from lightserve.text.logprobs import PromptToken


@dataclass(frozen=True, slots=True)
class StreamOut:
    """One token of one prompt. The texts of a prompt's tokens add up to its whole text."""

    index: int  # of the prompt
    token_id: int | None  # None: the request failed before a token was sampled
    logprob: float | None  # if requested
    text: str
    finish_reason: FinishReason | None
    top: list[tuple[int, float]] | None = None  # the most likely tokens and their logprobs, if requested
    error: str | None = None  # why it was aborted
    prompt: list[PromptToken] | None = None  # with the first token, if prompt_logprobs were requested
    drafts: RequestDrafts | None = None  # with the last token, if there were any


@dataclass(slots=True)
class Generation:
    """The result of one prompt."""

    prompt_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)  # (token id, logprob), most likely first
    finish_reason: FinishReason | None = None
    error: str | None = None  # why it was aborted
    prompt_logprobs: list[PromptToken] | None = None  # if requested
    drafts: RequestDrafts | None = None  # None: there were none

    def add(self, out: StreamOut) -> None:
        """Its next token."""
        self.text += out.text
        if out.token_id is not None:
            self.token_ids.append(out.token_id)
        if out.logprob is not None:
            self.logprobs.append(out.logprob)
            self.top_logprobs.append(out.top or [])
        self.finish_reason, self.error, self.drafts = out.finish_reason, out.error, out.drafts
        self.prompt_logprobs = self.prompt_logprobs or out.prompt
