"""Bodies in SGLang's format, and the engine requests that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import Field

from lightserve.errors import InvalidRequestError, NotSupportedYetError, PromptTooLongError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.engine_client import PromptRequest
from lightserve.httpserver.fields.generation import GenerationBody, RequestId, validate_supported
from lightserve.httpserver.fields.grammar import requested_grammar
from lightserve.httpserver.fields.images import read_prompt_images, with_images, with_placeholders
from lightserve.httpserver.fields.sampling import build_prompt_requests, check_choices
from lightserve.httpserver.generate.sglang.media import image_sources
from lightserve.httpserver.http.body import Body
from lightserve.httpserver.routed_experts import experts_shape
from lightserve.media.sources import ReadImage

DEFAULT_NEW_TOKENS = 128
# a field of sampling_params: ours; the others have the same name
RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
SAME_NAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "logit_bias"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "skip_special_tokens", "no_stop_trim"),
    *("json_schema", "regex", "ebnf"),
)
WITHOUT_EFFECT = frozenset({"spaces_between_special_tokens", "stream_interval"})
REFUSED = ("video_data", "audio_data", "input_embeds", "custom_logit_processor", "session_params")

Ids = Annotated[list[int], Field(fail_fast=True)]
IdLists = Annotated[list[Ids], Field(fail_fast=True)]


class SglangBody(Body):
    """``text`` or ``input_ids``, one prompt or several. Several, or n > 1, have a list as their response."""

    other_fields: ClassVar[frozenset[str]] = frozenset(REFUSED)

    text: str | list[str] | None = None
    input_ids: Ids | IdLists | None = None
    image_data: Any = Field(None, description="images: URLs or base64; for several prompts a list with one entry each")
    sampling_params: dict[str, Any] = Field(description="temperature, top_p, max_new_tokens, stop and others")
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1)] | None = Field(
        None, description="logprobs of the prompt from this token on; -1, the default: none of the prompt"
    )
    top_logprobs_num: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    rid: RequestId | None = None
    lora_path: str | None = Field(None, description="the name of an adapter")
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    return_routed_experts: bool | None = Field(None, description="of each token but the last: see docs/rl.md")
    routed_experts_start_len: Annotated[int, Field(ge=0)] | None = Field(None, description="from this token on")

    @property
    def is_batch(self) -> bool:
        given = self.input_ids if self.input_ids is not None else self.text
        return isinstance(given, list) and (isinstance(given[0], list | str) if given else False)


@dataclass(frozen=True, slots=True)
class SglangRequest:
    prompt_requests: list[PromptRequest]
    n: int
    is_list: bool  # the response is a list
    has_logprobs: bool
    prompt_start: int | None  # prompt logprobs from this token on; None: none
    top_logprobs: int
    shows_text: bool  # of tokens, beside their logprobs
    experts_start: int | None  # which experts were chosen from this token on; None: the client does not want to know
    is_prompt_only: bool  # max_new_tokens is 0: the token that the engine generates is not shown


async def sglang_request(context: ServerContext, body: SglangBody) -> SglangRequest:
    _refuse(context, body)
    prompts = await _prompt_ids(context, body)
    images = await _read_images(context, body, len(prompts))
    prompts = [with_placeholders(context, ids, read) for ids, read in zip(prompts, images, strict=True)]
    has_logprobs = bool(body.return_logprob)
    top = body.top_logprobs_num or 0
    start = body.logprob_start_len if has_logprobs and body.logprob_start_len not in (None, -1) else None
    fields = _sampling_fields(body.sampling_params)
    if start is not None:
        fields["prompt_logprobs"] = top
    try:
        sampling = validate_supported(GenerationBody, fields | {"priority": body.priority})
        top = context.top_logprobs("top_logprobs_num", top) or 0
        check_choices(context, len(prompts), sampling.choices)
        grammar = await requested_grammar(context, sampling)
        logprobs = top if has_logprobs else None
        requests = build_prompt_requests(context, sampling, prompts, logprobs, DEFAULT_NEW_TOKENS, grammar)
    except PromptTooLongError as error:
        limit = context.manager.limits.max_req_total_len
        wanted = body.sampling_params.get("max_new_tokens")
        raise PromptTooLongError(max(map(len, prompts)), limit, wanted, "max_new_tokens") from error
    except InvalidRequestError as error:
        raise _renamed(error) from error
    is_list = body.is_batch or sampling.choices > 1
    requests = [_of_api(context, body, request) for request in requests]
    requests = [with_images(context, read, request) for read, request in zip(images, requests, strict=True)]
    shows_text = bool(body.return_text_in_logprobs)
    experts_start = (body.routed_experts_start_len or 0) if body.return_routed_experts else None
    return SglangRequest(
        requests, sampling.choices, is_list, has_logprobs, start, top, shows_text, experts_start,
        sampling.is_prompt_only,
    )  # fmt: skip


def _of_api(context: ServerContext, body: SglangBody, request: PromptRequest) -> PromptRequest:
    """With the adapter, and logprobs of what was sampled unless --logprobs_mode says otherwise."""
    if body.return_routed_experts:
        experts_shape(context, request.params)
    is_processed = context.config.processed_logprobs
    params = request.params.replace(
        processed_logprobs=True if is_processed is None else is_processed,
        routed_experts=bool(body.return_routed_experts),
    )
    scheduling = msgspec.structs.replace(request.scheduling, lora=context.adapter_of(body.lora_path))
    return PromptRequest(request.prompt_ids, params, scheduling)


def _refuse(context: ServerContext, body: SglangBody) -> None:
    for name in REFUSED:
        if (body.model_extra or {}).get(name):
            raise NotSupportedYetError(name, name)
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequestError("give text or input_ids, one of them", "input_ids")


async def _read_images(context: ServerContext, body: SglangBody, prompts: int) -> list[list[ReadImage]]:
    sources = image_sources(body.image_data, prompts, body.is_batch)
    return [await read_prompt_images(context, of_prompt, "") for of_prompt in sources]


async def _prompt_ids(context: ServerContext, body: SglangBody) -> list[list[int]]:
    prompts: list[list[int]]
    if body.input_ids is None:
        texts = [body.text] if isinstance(body.text, str) else body.text or []
        prompts = [await context.encode(text) for text in texts]
    else:
        prompts = body.input_ids if body.is_batch else [body.input_ids]  # type: ignore[assignment,list-item]
        for ids in prompts:
            context.manager.check_ids("input_ids", ids)
    if not prompts or not all(prompts):
        raise InvalidRequestError("input_ids: a prompt must not be empty", "input_ids")
    return prompts


def _sampling_fields(params: Mapping[str, Any]) -> dict[str, Any]:
    """With our names. Unknown ones are ignored; those of SGLang that would change the output are refused."""
    given = {name: value for name, value in params.items() if value is not None and name not in WITHOUT_EFFECT}
    for name in ("stop_regex", "custom_params"):
        if given.get(name):
            raise NotSupportedYetError(f"sampling_params.{name}", f"sampling_params.{name}")
    fields = {name: given[name] for name in SAME_NAME if name in given}
    fields |= {ours: given[theirs] for theirs, ours in RENAMED.items() if theirs in given}
    if "structural_tag" in given:
        fields["structured_outputs"] = {"structural_tag": given["structural_tag"]}
    return fields


def _renamed(error: InvalidRequestError) -> InvalidRequestError:
    """With the names that the client has used."""
    text, param = str(error), error.param
    for theirs, ours in RENAMED.items():
        text = text.replace(ours, theirs)
        param = theirs if param == ours else param
    return type(error)(text, param)


def prompt_lengths(requests: Sequence[PromptRequest]) -> int:
    return sum(len(request.prompt_ids) for request in requests)
