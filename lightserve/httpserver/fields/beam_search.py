"""The fields of a body that shape a beam search, and the fields that it excludes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.beam_search.algorithm import MAX_CANDIDATES, MAX_LENGTH_PENALTY, BeamParams
from lightserve.httpserver.manager import Ask
from lightserve.httpserver.wire.body import Body
from lightserve.io_struct import GenerationParams

PLAIN = GenerationParams()
# sampling parameters that say which token may follow which: a search asks for the model's own likeliest tokens
RULES = (
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
    """The fields of a body that shape a beam search; without one they have no effect."""

    num_beams: Annotated[int, Field(ge=1, le=MAX_CANDIDATES)] | None = Field(
        default=None, description="beams of a search; 1, the default: none"
    )
    length_penalty: Annotated[float, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] | None = Field(
        default=None, description="a beam's score is its logprob / its length ** this; default 1"
    )
    early_stopping: bool | Literal["never"] | None = Field(
        default=None, description='true: stop at num_beams ends; "never": only when no beam can become better'
    )

    def beam_params(self, num_beams: int, n: int, asks: Sequence[Ask]) -> BeamParams:
        """The search that was asked for, the ``n`` best of every prompt. ``asks`` differ by their prompts only."""
        stopping = asks[0].params.stopping
        return BeamParams(
            num_beams=num_beams,
            n=n,
            # a context that is full ends it too
            max_new_tokens=max(ask.params.stopping.max_new_tokens for ask in asks),
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=self.early_stopping or False,
            ignore_eos=stopping.ignore_eos,
            stop_token_ids=stopping.stop_token_ids,
        )


def refuse_rules(params: GenerationParams, names: Mapping[str, str]) -> None:
    """A search obeys no rules on tokens; ``names`` are the body's names of sampling parameters, where they differ."""
    for rule in RULES:
        if params.get(rule) != PLAIN.get(rule):
            raise not_with_beams(names.get(rule, rule))


def not_with_beams(name: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}: does not combine with a beam search", name)
