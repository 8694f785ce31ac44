"""A model without a server: it runs the server's scheduler and worker in this process."""

from __future__ import annotations

import gc
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from numbers import Integral
from types import TracebackType
from typing import Any, Self, overload

from lightserve.common.device import pick_device
from lightserve.common.parallel import Parallel
from lightserve.config import RouterConfig, WorkerConfig
from lightserve.detokenization.req_text import ReqText
from lightserve.errors import InvalidRequestError, PromptTooLongError, ServerError, TextOnlyError
from lightserve.media.tokens import room_for_tokens, with_image_ids
from lightserve.messages.int_arrays import int32s
from lightserve.messages.output import RequestDrafts
from lightserve.messages.params import FinishReason, GenerationParams
from lightserve.messages.step import ReqFailed, StepResult, TokenOut
from lightserve.messages.worker_calls import LoraLoad
from lightserve.model_files.config.sampling_defaults import read_sampling_defaults
from lightserve.model_files.lora.paths import parse_module
from lightserve.model_files.source import require_weights, resolve
from lightserve.model_files.speculation import resolved_speculation, served_with_head
from lightserve.model_files.tokenizer.tokenizer import NO_TOKENIZER, Tokenizer, load_tokenizer_or_none
from lightserve.offline.chat import Conversation, check_conversation, is_conversation, is_one_prompt
from lightserve.offline.checks import checked_model
from lightserve.offline.fields import check_n, known_fields, repeated
from lightserve.offline.image_parts import for_template
from lightserve.offline.images import ImagePrompt, apply_sight, is_of, open_images, plain_ids
from lightserve.offline.pooling import PoolingMethods
from lightserve.router.images.image_waits import ImageFailed, without_image_ids
from lightserve.router.kv.group_pools import make_group_pools
from lightserve.router.kv.pool import KvPool
from lightserve.router.req import Req
from lightserve.router.scheduler import GroupScheduler, LoraSlots, ReqTokens, Scheduler, make_limits
from lightserve.text.beam_search import BeamBatch, BeamParams, BeamResult, BeamSearch
from lightserve.text.logprobs import PromptToken, unpack_prompt_logprobs
from lightserve.utils.logger import init_logger
from lightserve.worker.rpc import GetResult
from lightserve.worker.select import worker_class

logger = init_logger(__name__)

Prompt = str | Sequence[int]
Loras = str | Sequence[str | None] | None  # an adapter for all prompts, or one each
Params = GenerationParams | Sequence[GenerationParams] | None  # one for all prompts, or one each


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


class LLM(PoolingMethods):
    """``LLM()`` loads the default model. Options are the fields of WorkerConfig. Use it from one thread.

    ``generation_config`` is the server's flag: whose sampling parameters count where a call gives none.
    ``limit_mm_per_prompt``: ``{"image": 0}`` loads no vision tower.
    """

    def __init__(
        self,
        model_dir: str | None = None,
        generation_config: str = "auto",
        limit_mm_per_prompt: Mapping[str, int] | None = None,
        **options: Any,
    ) -> None:
        self.config = served_with_head(WorkerConfig(model_dir=model_dir, **options))
        source = resolve(self.config.model_dir, needs_weights=False, trusts_code=self.config.trust_remote_code)
        model = checked_model(self.config, source)
        self.config = resolved_speculation(self.config, source, model)
        if self.config.load_format != "dummy":
            require_weights(source)
        self._sampling_defaults = read_sampling_defaults(source, generation_config)
        self._tokenizer = load_tokenizer_or_none(source)
        if self._tokenizer is None:
            logger.warning(NO_TOKENIZER, source.path)
        elif self._tokenizer.note:
            logger.info(self._tokenizer.note)
        self._images = open_images(self.config, source, self._tokenizer, limit_mm_per_prompt)
        self.worker = worker_class(self.config, source)(self.config, source, Parallel())
        if self._images is not None:
            self._images.use_worker(self.worker)
        self.worker.capture()
        vocab_size = self.worker.model_config.vocab_size
        self.eos_token_ids = tuple(token for token in source.eos_token_ids() if token < vocab_size)
        limits = make_limits(self.config, RouterConfig(), self.worker.step_limits, self.worker.pooling_limits)
        tokens = self.worker.max_total_token_num
        pool = KvPool(tokens, make_group_pools(self.worker.kv_groups, tokens), limits.kv_lookahead)
        self._scheduler = Scheduler(GroupScheduler(pool, limits, loras=LoraSlots(self.config.num_loras)))
        if self._images is not None:
            self._images.use_scheduler(self._scheduler.only_group)
        self._adapters: dict[str, int] = {}  # id of each one that is loaded, by its name or folder
        self._open: dict[int, _OpenStream] = {}
        self._in_flight: deque[GetResult] = deque()  # steps that were launched, oldest first
        self._ids = itertools.count()

    def close(self) -> None:
        """Free the memory of the model. An LLM that is closed cannot be used any more."""
        if "worker" in self.__dict__:
            self._open.clear()
            self._in_flight.clear()
            del self.worker, self._scheduler
            gc.collect()
            pick_device(self.config.device).free_cached_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name in ("worker", "_scheduler"):
            raise ServerError("this LLM is closed; make another one")
        raise AttributeError(f"LLM has no attribute {name!r}", name=name, obj=self)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequestError("this model has no tokenizer; give prompts as token ids")
        return self._tokenizer

    def get_default_sampling_params(self) -> GenerationParams:
        """The parameters of a call that gives none: those that the model's files recommend."""
        return GenerationParams.of(**self._sampling_defaults.fill({}))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        lora: Loras = None,
        **fields: Any,
    ) -> list[Generation]:
        """Complete every prompt (text or token ids).

        Parameters are keywords (``max_new_tokens=16``), or ``params`` for all prompts or one for each. Without
        ``params``, the others are those of ``get_default_sampling_params``. ``lora``: a name of ``lora_modules`` or the
        folder of an adapter, for all prompts or one for each; None: the base model. ``n``: texts of each prompt, which
        follow one another in the result. ``json_schema``, ``regex`` or ``choice``: what the text must be.
        """
        return next(filter(None, self.generation_steps(prompts, params, lora=lora, **fields)), [])

    def generation_steps(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, lora: Loras = None, **fields: Any
    ) -> Iterator[list[Generation]]:
        """Like ``generate``, for a caller that does other things between tokens: yields an empty list for each token,
        and the result at the end."""
        requests = self._requests(prompts, params, fields, lora)
        generations = [Generation(without_image_ids(req).tolist()) for req in requests]
        for out in self._run(requests):
            generations[out.index].add(out)
            yield []
        yield generations

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        lora: Loras = None,
        **fields: Any,
    ) -> Iterator[StreamOut]:
        """Like ``generate``, but yields every token as it comes. The tokens of several prompts alternate."""
        return self._run(self._requests(prompts, params, fields, lora))

    @overload
    def chat(
        self, messages: Conversation, params: GenerationParams | None = None, *, lora: Loras = None, **fields: Any
    ) -> Iterator[StreamOut]: ...

    @overload
    def chat(
        self, messages: Sequence[Conversation], params: Params = None, *, lora: Loras = None, **fields: Any
    ) -> list[Generation]: ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params = None,
        *,
        lora: Loras = None,
        **fields: Any,
    ) -> Iterator[StreamOut] | list[Generation]:
        """Answer a conversation, and yield every token as it comes. Of a list of conversations, return all answers."""
        fields = {"continues_text": False} | fields
        if is_conversation(messages):
            return self.stream(self.chat_prompts(messages), params, lora=lora, **fields)
        return self.generate(self.chat_prompts(messages), params, lora=lora, **fields)

    def chat_prompts(self, messages: Any) -> list[list[int]]:
        """The token ids of a conversation, or of each of a list of them."""
        conversations = [messages] if is_conversation(messages) else messages
        return [self._chat_ids(conversation) for conversation in conversations]

    def _chat_ids(self, messages: Any) -> list[int]:
        check_conversation(messages)
        messages, images = for_template(messages)
        text = self.tokenizer.apply_chat_template(messages)
        if not images:
            return self.tokenizer.encode(text, add_special_tokens=False)
        if self._images is None:
            raise TextOnlyError("an image", "messages")
        return self._images.prompt_of(text, images)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamParams | None = None
    ) -> list[list[BeamResult]]:
        """The most likely continuations of every prompt that beam search finds, best first."""
        params = params or BeamParams()
        self._check_ids("stop_token_ids", params.stop_token_ids)
        starts = [plain_ids(req) for req in self._requests(prompts, None, {})]
        searches = [BeamSearch(params, self.eos_token_ids, self.worker.longest_request - len(ids)) for ids in starts]
        batch = BeamBatch(starts, searches)
        while sequences := batch.sequences():
            batch.advance([generation.top_logprobs[0] for generation in self.generate(sequences, batch.params)])
        return batch.best()

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params,
        fields: dict[str, Any],
        lora: Loras = None,
    ) -> list[Req]:
        self._check_generates()
        n, fields = check_n(fields.get("n", 1)), known_fields(fields)
        fields.pop("n", None)
        many = [prompts] if is_one_prompt(prompts) else list(prompts)
        if params is None or isinstance(params, GenerationParams):
            params = [params or GenerationParams.of(**self._sampling_defaults.fill(fields))] * len(many)
        if len(params) != len(many):
            raise InvalidRequestError(f"{len(many)} prompts but {len(params)} sets of parameters")
        loras = [lora] * len(many) if lora is None or isinstance(lora, str) else list(lora)
        if len(loras) != len(many):
            raise InvalidRequestError(f"{len(many)} prompts but {len(loras)} adapters")
        ids = [self._adapter(adapter) for adapter in loras]
        requests = [
            self._request(prompt, repeated(prompt_params.replace(**fields), choice))
            for prompt, prompt_params in zip(many, params, strict=True)
            for choice in range(n)
        ]
        for req, lora_id in zip(requests, [lora_id for lora_id in ids for _ in range(n)], strict=True):
            req.lora_id, req.salt = lora_id, "" if lora_id is None else f"lora {lora_id}"
        return requests

    def _adapter(self, lora: str | None) -> int | None:
        """The id of an adapter, which is in host memory afterwards."""
        if lora is None:
            return None
        if self.worker.loras is None:
            raise InvalidRequestError("this LLM takes no adapters; give max_loras or lora_modules", "lora")
        folder = dict(map(parse_module, self.config.lora_modules)).get(lora, lora)
        if folder not in self._adapters:
            lora_id = len(self._adapters)
            loaded = self.worker.loras.load(LoraLoad(lora_id, folder))
            if loaded.error:
                raise InvalidRequestError(f"the adapter {lora!r} cannot be used: {loaded.error}", "lora")
            self._adapters[folder] = lora_id
            self._scheduler.only_group.loras.loaded.add(lora_id)
        return self._adapters[folder]

    def _request(self, prompt: Any, params: GenerationParams) -> Req:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        images = prompt.images if isinstance(prompt, ImagePrompt) else ()
        longest = room_for_tokens(self.worker.longest_request, len(ids), images)
        if not ids:
            raise InvalidRequestError("the prompt is empty")
        self._check_ids("a prompt's token ids", ids)
        self._check_ids("stop_token_ids", params.stopping.stop_token_ids)
        if len(ids) >= longest:
            raise PromptTooLongError(len(ids), longest)
        max_new_tokens = min(params.stopping.max_new_tokens, longest - len(ids))
        prompt_ids = with_image_ids(int32s(ids), images)
        req = Req(next(self._ids), prompt_ids, params, max_new_tokens, self.eos_token_ids, images=images)
        return apply_sight(req, self.worker, self._scheduler.only_group)

    def _check_ids(self, what: str, ids: Sequence[Any]) -> None:
        vocab_size = self.worker.model_config.vocab_size
        if not all(isinstance(token, Integral) and 0 <= int(token) < vocab_size for token in ids):
            raise InvalidRequestError(f"{what} must be integers in 0..{vocab_size - 1}")

    def _run(self, requests: Sequence[Req]) -> Iterator[StreamOut]:
        """Run steps until these requests end. Other open streams share the steps."""
        outs: deque[StreamOut] = deque()
        decoder = None if self._tokenizer is None else self._tokenizer.decoder
        for i, req in enumerate(requests):
            self._open[req.req_id] = _OpenStream(i, ReqText(decoder, req.params.text), outs)
            if self._images is not None:
                self._images.enter(req, self._scheduler.only_group.pool.cached_len(req))
            self._scheduler.add(req)
        pending = len(requests)
        try:
            while pending:
                while not outs:
                    self._step()
                out = outs.popleft()
                pending -= out.finish_reason is not None
                yield out
        finally:  # the caller may stop iterating
            for req in requests:
                if self._open.pop(req.req_id, None) is not None:
                    self._scheduler.abort(req.req_id)

    def _step(self) -> None:
        """Keep the worker busy, and give the tokens of the oldest step to their streams."""
        try:
            if self._images is not None and self._fail_images(self._images.encode()):
                return
            while len(self._in_flight) < self.worker.pipeline_depth and (step := self._scheduler.next_step()):
                self._in_flight.append(self.worker.launch(step))
            if not self._in_flight:
                raise ServerError("the request was dropped because a step of its batch failed")
            result = self._in_flight.popleft()()
            self._scheduler.complete_step()
            self._distribute(result)
        except Exception:
            self._drop_requests()
            self._scheduler.cancel_steps()
            raise
        except BaseException:  # an interrupt may have stopped the scheduler in the middle of a change
            self._drop_requests()
            self._scheduler.reset()
            raise

    def _drop_requests(self) -> None:
        """End all streams. The worker has no step in flight and no request afterwards."""
        self._open.clear()
        self._in_flight.clear()
        self.worker.reset()

    def _distribute(self, result: StepResult) -> None:
        """Give the tokens of a step to their streams."""
        for embedding in result.embeddings:
            if self._scheduler.process_embedding(embedding.req_id) is not None:
                self._results[embedding.req_id] = embedding.values
        self._scheduler.observe_drafts(result.drafts)
        for req_id, proposed, accepted in result.drafts.rows():
            if req_id in self._open:
                self._open[req_id].text.count_drafts(proposed, accepted)
        for _, outs in groupby(result.tokens, key=lambda out: out.req_id):
            tokens = self._scheduler.process_req(list(outs))
            if tokens is not None:
                self._push_tokens(tokens)
        for failure in result.failed:
            if self._scheduler.fail(failure) is None:
                continue
            if failure.req_id in self._open:
                self._fail(failure)
            else:
                self._failures[failure.req_id] = failure.message

    def _fail_images(self, failures: Sequence[ImageFailed]) -> bool:
        """Returns whether requests ended."""
        for failed in failures:
            for req in self._scheduler.drop(partial(is_of, failed)):
                self._fail(ReqFailed(req.req_id, failed.status, failed.message))
        return bool(failures)

    def _fail(self, failure: ReqFailed) -> None:
        stream = self._open.pop(failure.req_id)
        stream.outs.append(StreamOut(stream.index, None, None, "", FinishReason.ABORT, error=failure.message))

    def _push_tokens(self, tokens: ReqTokens) -> None:
        """The last token may end the request, and a stop string before it."""
        for out in tokens.outs:
            is_last = out is tokens.outs[-1]
            self._push_token(tokens.req, out, tokens.req.finish_reason if is_last else None)
            if tokens.req.req_id not in self._open:
                return

    def _push_token(self, req: Req, out: TokenOut, finish_reason: FinishReason | None) -> None:
        stream, token = self._open[req.req_id], out.token
        text = stream.text.push(token.id, finish_reason, req.is_text_token)
        if stream.text.matched_stop is not None:
            finish_reason = FinishReason.STOP
            self._scheduler.abort(req.req_id)
        if finish_reason is not None:
            del self._open[req.req_id]
        prompt = (
            None
            if token.prompt_logprobs is None
            else unpack_prompt_logprobs(without_image_ids(req).tolist(), token.prompt_logprobs)
        )
        stream.outs.append(
            StreamOut(
                stream.index,
                token.id,
                token.logprob,
                text,
                finish_reason,
                token.top_logprobs,
                prompt=prompt,
                drafts=None if finish_reason is None else stream.text.drafts,
            )
        )


@dataclass(frozen=True, slots=True)
class _OpenStream:
    """The stream of a request that has not ended."""

    index: int  # of its prompt
    text: ReqText
    outs: deque[StreamOut]  # of the stream that it belongs to
