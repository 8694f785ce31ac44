"""Every message that crosses a process boundary, and nothing else. Neither torch nor a tokenizer is imported here.

The scheduler tells the workers what to run in a Step: requests that enter, the slots that each row of the step fills,
requests that leave. A worker knows the rest (the tokens of its requests), so prefill, a chunk of it and decode are the
same message: the next len(slots) tokens of a request.
"""

from __future__ import annotations

import enum
import math

import msgspec

from lightserve.errors import InvalidRequestError

GREEDY_BELOW = 1e-5  # a temperature under this is greedy: dividing by it would overflow


class FinishReason(enum.Enum):
    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_new_tokens, or the longest request the server takes
    ABORT = "abort"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    max_new_tokens: int = 16
    min_new_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # None: a random one
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    logprobs: bool = False  # of the chosen tokens

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        try:
            msgspec.convert(msgspec.structs.asdict(self), _SamplingTypes)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(str(error)) from error
        limits = {
            "max_new_tokens": self.max_new_tokens >= 1,
            "min_new_tokens": 0 <= self.min_new_tokens <= self.max_new_tokens,
            "temperature": 0 <= self.temperature < math.inf,
            "top_p": 0 < self.top_p <= 1,
            "top_k": self.top_k == -1 or self.top_k >= 1,
            "min_p": 0 <= self.min_p <= 1,
            "repetition_penalty": 0 < self.repetition_penalty < math.inf,
            "presence_penalty": -2 <= self.presence_penalty <= 2,
            "frequency_penalty": -2 <= self.frequency_penalty <= 2,
            "seed": self.seed is None or -(2**63) <= self.seed < 2**63,
            "stop": all(self.stop),
        }
        for name, is_within in limits.items():
            if not is_within:
                raise InvalidRequestError(f"{name}={getattr(self, name)!r} is out of range")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def has_penalty(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


# the fields without the checks, so that they can be checked
_SamplingTypes = msgspec.defstruct(
    "_SamplingTypes", [(field.name, field.type) for field in msgspec.structs.fields(SamplingParams)]
)


class NewReq(msgspec.Struct, frozen=True):
    """A request that enters the workers."""

    req_id: int
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int
    eos_ids: tuple[int, ...] = ()  # not to be sampled before min_new_tokens


class StepRow(msgspec.Struct, frozen=True):
    """Compute the request's next len(slots) tokens into these KV slots."""

    req_id: int
    slots: list[int]


class Step(msgspec.Struct, frozen=True, tag=True):
    """One forward pass. Requests in ``free`` leave before it, requests in ``new`` enter."""

    rows: list[StepRow]
    new: list[NewReq] = []
    free: list[int] = []


class TokenOut(msgspec.Struct, frozen=True):
    """A token sampled for a request whose known tokens are all computed."""

    req_id: int
    token_id: int
    logprob: float | None = None  # where the request asked for it
