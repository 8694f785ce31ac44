"""The fields of a body that shape a beam search, and the fields that it excludes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.engine_client import PromptRequest
from lightserve.httpserver.http.body import Body
from lightserve.messages.params import GenerationParams
from lightserve.text.beam_search import MAX_CANDIDATES, MAX_LENGTH_PENALTY, BeamParams

DEFAULTS = GenerationParams()
# parameters that change which tokens are likely: a beam search uses the model's own top tokens
EXCLUDED_PARAMS = (
    "min_new_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words_ids",
    "no_repeat_ngram_size",
    "allowed_token_ids",
    "first_allowed_token_ids",
    "exponential_decay_length_penalty",
    "watermark",
    "grammar",
    "thinking",
    "stop",
)


class BeamFields(Body):
    """The fields of a beam search; without one they have no effect."""

    num_beams: Annotated[int, Field(ge=1, le=MAX_CANDIDATES)] | None = Field(
        default=None, description="beams of a beam search; 1, the default: no beam search"
    )
    length_penalty: Annotated[float, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] | None = Field(
        default=None, description="score = logprob / length ** length_penalty; default 1"
    )
    early_stopping: bool | Literal["never"] | None = Field(
        default=None,
        description='true: stop when num_beams sequences have ended; "never": only when no beam can become better',
    )

    def beam_params(self, num_beams: int, n: int, prompt_requests: Sequence[PromptRequest]) -> BeamParams:
        """``n`` is the number of sequences to return for a prompt. The requests differ in their prompts only."""
        stopping = prompt_requests[0].params.stopping
        return BeamParams(
            num_beams=num_beams,
            n=n,
            # a full context ends the search of a prompt earlier
            max_new_tokens=max(prompt_request.params.stopping.max_new_tokens for prompt_request in prompt_requests),
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=self.early_stopping or False,
            ignore_eos=stopping.ignore_eos,
            stop_token_ids=stopping.stop_token_ids,
        )


def refuse_excluded_params(params: GenerationParams, names: Mapping[str, str]) -> None:
    """``names`` are the body's names of parameters, where they differ."""
    for param in EXCLUDED_PARAMS:
        if params.get(param) != DEFAULTS.get(param):
            raise not_with_beam_search(names.get(param, param))


def not_with_beam_search(name: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}: does not combine with a beam search", name)
