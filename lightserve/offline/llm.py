"""A model without a server: it runs the server's scheduler and worker in this process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple, overload

from lightserve.config import RouterConfig, WorkerConfig
from lightserve.errors import InvalidRequestError, PromptTooLongError, TextOnlyError
from lightserve.media.tokens import room_for_tokens, with_image_ids
from lightserve.messages.control import EngineInfo
from lightserve.messages.int_arrays import int32s
from lightserve.messages.params import GenerationParams
from lightserve.messages.worker_calls import LoraLoad
from lightserve.model_files.config.sampling_defaults import read_sampling_defaults
from lightserve.model_files.lora.paths import parse_module
from lightserve.model_files.source import require_weights, resolve
from lightserve.model_files.speculation import resolved_speculation, served_with_head
from lightserve.model_files.tokenizer.tokenizer import NO_TOKENIZER, Tokenizer, load_tokenizer_or_none
from lightserve.offline.chat import Conversation, check_conversation, is_conversation, is_one_prompt
from lightserve.offline.checks import checked_model
from lightserve.offline.fields import check_n, known_fields, repeated
from lightserve.offline.image_parts import for_template, split_prompt
from lightserve.offline.images import ImagePrompt, apply_sight, open_images, plain_ids
from lightserve.offline.options import known_options
from lightserve.offline.pooling import PoolingMethods
from lightserve.offline.ranks import server_config, start_ranks
from lightserve.offline.results import Generation, StreamOut
from lightserve.router.images.image_waits import without_image_ids
from lightserve.router.kv.group_pools import make_group_pools
from lightserve.router.kv.identity import kv_identity
from lightserve.router.kv.pool import KvPool
from lightserve.router.kv.tiers.tiers import KvTiers
from lightserve.router.lora.registry import adapter_salt
from lightserve.router.req import Req
from lightserve.router.scheduler import GroupScheduler, LoraSlots, Scheduler, SchedulerLimits, make_limits
from lightserve.text.beam_search import BeamBatch, BeamParams, BeamResult, BeamSearch
from lightserve.utils.logger import init_logger
from lightserve.worker.select import served_pooling

logger = init_logger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]  # vLLM's form may have images
Loras = str | Sequence[str | None] | None  # an adapter for all prompts, or one each
Params = GenerationParams | Sequence[GenerationParams] | None  # one for all prompts, or one each


class Adapter(NamedTuple):
    lora_id: int
    digest: str  # of its files


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
        self.config = served_with_head(WorkerConfig(**known_options({"model_dir": model_dir, **options})))
        source = resolve(self.config.model_dir, needs_weights=False, trusts_code=self.config.trust_remote_code)
        model = checked_model(self.config, source)
        self.config = resolved_speculation(self.config, source, model)
        if self.config.load_format != "dummy":
            require_weights(source)
        self._sampling_defaults = read_sampling_defaults(source, generation_config)
        tokenizer = load_tokenizer_or_none(source)
        if tokenizer is None:
            logger.warning(NO_TOKENIZER, source.path)
        elif tokenizer.note:
            logger.info(tokenizer.note)
        images = open_images(self.config, source, tokenizer, limit_mm_per_prompt)
        ranks = start_ranks(self.config, source, images)
        engine = ranks.engine
        limits = make_limits(self.config, RouterConfig(), engine.step_limits, engine.pooling)
        identity = kv_identity(server_config(self.config, source), engine)
        scheduler = Scheduler(*(self._new_group(engine, limits, identity) for _ in range(self.config.num_groups)))
        if images is not None:
            images.use_scheduler(scheduler)
        super().__init__(ranks, scheduler, tokenizer, images)
        self.eos_token_ids = engine.eos_token_ids
        self.pooling = served_pooling(self.config, source)
        self._adapters: dict[str, Adapter] = {}  # those that are loaded, by folder
        self._ids = itertools.count()

    def _new_group(self, engine: EngineInfo, limits: SchedulerLimits, identity: str) -> GroupScheduler:
        tokens = engine.max_total_token_num
        pool = KvPool(tokens, make_group_pools(engine.kv_groups, tokens), limits.kv_lookahead)
        group = GroupScheduler(pool, limits, loras=LoraSlots(self.config.num_loras))
        if engine.cpu_kv is not None:
            group.add_source(KvTiers(pool, engine.cpu_kv, identity))
        return group

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
        """Complete every prompt: text, token ids, or vLLM's ``{"prompt": text, "multi_modal_data": {"image": image}}``.

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

    generate_stream = stream  # the name that the server's endpoint has

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

    def _with_images(self, prompt: Any) -> Any:
        """A prompt of vLLM's form as text or token ids."""
        if not isinstance(prompt, Mapping):
            return prompt
        content, images = split_prompt(prompt)
        if not images:
            return content
        if self._images is None:
            raise TextOnlyError("an image", "multi_modal_data")
        return self._images.prompt_of(content, images, self.tokenizer.encode)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamParams | None = None
    ) -> list[list[BeamResult]]:
        """The most likely continuations of every prompt that beam search finds, best first."""
        params = params or BeamParams()
        self._check_ids("stop_token_ids", params.stop_token_ids)
        starts = [plain_ids(req) for req in self._requests(prompts, None, {})]
        searches = [BeamSearch(params, self.eos_token_ids, self._engine.max_req_total_len - len(ids)) for ids in starts]
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
        many = [self._with_images(each) for each in ([prompts] if is_one_prompt(prompts) else prompts)]
        if params is None or isinstance(params, GenerationParams):
            params = [params or GenerationParams.of(**self._sampling_defaults.fill(fields))] * len(many)
        if len(params) != len(many):
            raise InvalidRequestError(f"{len(many)} prompts but {len(params)} sets of parameters")
        loras = [lora] * len(many) if lora is None or isinstance(lora, str) else list(lora)
        if len(loras) != len(many):
            raise InvalidRequestError(f"{len(many)} prompts but {len(loras)} adapters")
        adapters = [self._adapter(adapter) for adapter in loras]
        requests = [
            self._request(prompt, repeated(prompt_params.replace(**fields), choice))
            for prompt, prompt_params in zip(many, params, strict=True)
            for choice in range(n)
        ]
        for req, adapter in zip(requests, [adapter for adapter in adapters for _ in range(n)], strict=True):
            if adapter is not None:
                req.lora_id, req.salt = adapter.lora_id, adapter_salt(adapter.digest) + req.salt
        return requests

    def _adapter(self, lora: str | None) -> Adapter | None:
        """An adapter that is in host memory afterwards."""
        if lora is None:
            return None
        if not self._engine.lora_slots:
            raise InvalidRequestError("this LLM takes no adapters; give max_loras or lora_modules", "lora")
        folder = dict(map(parse_module, self.config.lora_modules)).get(lora, lora)
        if folder not in self._adapters:
            lora_id = len(self._adapters)
            loaded = self._ranks.load_adapter(LoraLoad(lora_id, folder))
            if loaded.error:
                raise InvalidRequestError(f"the adapter {lora!r} cannot be used: {loaded.error}", "lora")
            self._adapters[folder] = Adapter(lora_id, loaded.digest)
            for group in self._scheduler.groups:
                group.loras.loaded.add(lora_id)
        return self._adapters[folder]

    def _request(self, prompt: Any, params: GenerationParams) -> Req:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        images = prompt.images if isinstance(prompt, ImagePrompt) else ()
        longest = room_for_tokens(self._engine.max_req_total_len, len(ids), images)
        if not ids:
            raise InvalidRequestError("the prompt is empty")
        self._check_ids("a prompt's token ids", ids)
        self._check_ids("stop_token_ids", params.stopping.stop_token_ids)
        if len(ids) >= longest:
            raise PromptTooLongError(len(ids), longest)
        max_new_tokens = min(params.stopping.max_new_tokens, longest - len(ids))
        prompt_ids = with_image_ids(int32s(ids), images)
        req = Req(next(self._ids), prompt_ids, params, max_new_tokens, self.eos_token_ids, images=images)
        return apply_sight(req, self._engine, self._scheduler.groups[0])

    def _check_ids(self, what: str, ids: Sequence[Any]) -> None:
        vocab_size = self._engine.vocab_size
        if not all(isinstance(token, Integral) and 0 <= int(token) < vocab_size for token in ids):
            raise InvalidRequestError(f"{what} must be integers in 0..{vocab_size - 1}")
