"""What every route needs; one object a process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from lightserve.batches.store import BatchStore
from lightserve.config import HttpConfig
from lightserve.errors import InvalidRequestError, ModelNotFoundError, PromptTooLongError
from lightserve.httpserver.engine_client import HttpServerManager
from lightserve.httpserver.grammar.check import GrammarCheck
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.http.body import Body, read_json, validate
from lightserve.httpserver.http.key_limits import KeyLimiter, KeyLimits
from lightserve.httpserver.http.key_usage import KeyUsage
from lightserve.httpserver.http.middleware import ApiKeys
from lightserve.httpserver.http.unknown_fields import UnknownFields
from lightserve.httpserver.resume.stream_log import StreamLog
from lightserve.httpserver.rl.settings import RlSettings
from lightserve.httpserver.tracing.request_trace import Export
from lightserve.mcp.servers import MCP_FLAGS, McpConnector
from lightserve.messages.params import MAX_LOGPROBS
from lightserve.model_files.config.sampling_defaults import SamplingDefaults
from lightserve.model_files.model_summary import ModelDetails
from lightserve.model_files.pinned_prefixes import after_pinned_prefix
from lightserve.model_files.pooling import PoolingConfig
from lightserve.model_files.template.generation_prompts import GenerationPrompts
from lightserve.model_files.tokenizer.tokenizer import Tokenizer
from lightserve.outbound.urls import UrlRules

if TYPE_CHECKING:
    from lightserve.media.reader import ImageReader

T = TypeVar("T")
B = TypeVar("B", bound=Body)

ENCODE_LIMIT_S = 30.0  # 16 MB of digits, the slowest text, take 20 s
PLACEHOLDER_NAMES = ("tgi", "dummy")  # from Hugging Face's clients, if they know only the address of the server
LONG_TEXT = 2_000  # characters; longer text (about a millisecond) is encoded in a thread
COUNTED_TEXT = 100_000  # characters; longer text (0.13 s at most) is not encoded if it cannot fit anyway


@dataclass(frozen=True, slots=True)
class ServerContext:
    config: HttpConfig
    model_name: str  # the first of model_names; responses show it
    manager: HttpServerManager
    optional_tokenizer: Tokenizer | None  # a folder may have none
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)  # the model's
    grammars: GrammarCheck = field(default_factory=GrammarCheck)
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    created: int = field(default_factory=lambda: int(time.time()))
    run_dir: str | None = None  # the same for all HTTP processes of the server; None: there is none, in tests
    http_index: int = 0  # of this process among them
    details: ModelDetails | None = None  # None in tests without a model's files
    export_trace: Export | None = None  # None: requests are not traced
    pooling: PoolingConfig | None = None  # what the model computes instead of text; None: it generates
    pinned_prefixes: Mapping[str, list[int]] = field(default_factory=dict)  # token ids by name: --pinned_prefixes
    stream_log: StreamLog | None = None  # None: streams cannot be resumed
    batches: BatchStore | None = None  # None: without --batch_dir
    drafts_tokens: bool = False  # the engine, or one behind this gateway, may draft tokens: --speculative_config
    rl: RlSettings = field(default_factory=RlSettings)  # of the server: --enable_rl
    generation_prompts: GenerationPrompts = field(default_factory=GenerationPrompts)  # used by chats
    images: ImageReader | None = None  # None: the server reads none
    keys: ApiKeys = field(init=False)
    mcp: McpConnector = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        usage = KeyUsage(self.run_dir, self.http_index, config.num_processes) if config.api_key else None
        limiter = KeyLimiter(KeyLimits(config.key_requests_per_minute, config.key_concurrency), usage)
        object.__setattr__(self, "keys", ApiKeys(config.api_key, config.admin_key, limiter))
        rules = UrlRules(MCP_FLAGS, config.allowed_mcp_domains, config.mcp_private_hosts, config.allow_http_mcp)
        connector = McpConnector(rules, config.mcp_timeout, config.tool_servers, not config.no_mcp_urls)
        object.__setattr__(self, "mcp", connector)

    @property
    def tokenizer(self) -> Tokenizer:
        if self.optional_tokenizer is None:
            raise InvalidRequestError("this model has no tokenizer; give prompts as token ids")
        return self.optional_tokenizer

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names under which clients may ask for the model."""
        return tuple(dict.fromkeys((self.model_name, *self.config.model_name)))

    @property
    def has_chat(self) -> bool:
        """Whether browsers get the chat page at /."""
        return self.pooling is None and not self.config.no_web

    def warm_up(self) -> None:
        """Prepare what the first request would wait for: 0.3 s with a vocabulary of 128,000."""
        if self.optional_tokenizer is not None:
            if self.pooling is None:
                self.grammars.prepare(self.optional_tokenizer)
            self.optional_tokenizer.warm_up()

    def top_logprobs(self, field: str, k: int | None) -> int | None:
        """How many alternatives to a token a request gets that wants ``k``; -1: the vocabulary."""
        vocab_size = self.manager.limits.vocab_size
        if k is None or (self.config.enable_rl and k <= vocab_size):
            return vocab_size if k == -1 else k
        if self.config.enable_rl:
            raise InvalidRequestError(f"{field}: {k} alternatives; the vocabulary has {vocab_size} tokens", field)
        if not 0 <= k <= MAX_LOGPROBS:
            message = f"{field}: must be from 0 to {MAX_LOGPROBS}, found {k}; --enable_rl lifts the limit"
            raise InvalidRequestError(message, field)
        return k

    def default_new_tokens(self, of_endpoint: int | None = None) -> int | None:
        """The maximum of a request that names none: the endpoint's, else the model's, within --default_max_tokens.

        None: the rest of the context.
        """
        default = of_endpoint or self.sampling_defaults.max_new_tokens
        bounds = (default, self.config.default_max_tokens)
        return min((bound for bound in bounds if bound is not None), default=None)

    async def read(self, request: Request) -> dict[str, Any]:
        return await read_json(request, self.config.body_limit)

    async def read_body(
        self, request: Request, model: type[B], check: Callable[[type[B], dict[str, Any]], B] = validate
    ) -> B:
        """The body as a ``model``. Unknown fields near a known one are reported as in ``check_fields``."""
        body = check(model, await self.read(request))
        self.check_fields(request, body)
        return body

    def check_fields(self, request: Request, body: Body) -> None:
        """Report unknown fields that are near a known one; with --strict_fields they are an error."""
        request.state.warning = self.unknown_fields.check(body, self.config.strict_fields, request.scope["path"])

    def log(self, request: Request, request_id: str | None = None) -> AccessLog:
        """The access log of a request that generates. ``request_id`` is the body's; a header takes precedence."""
        if request_id is not None and "x-request-id" not in request.headers:
            request.state.request_id = request_id
        is_written = not self.config.disable_log_requests
        log = AccessLog(request.state.request_id, request.scope["path"], is_written, request.state.record)
        log.owner = self.owner(request)
        log.on_tokens = self.keys.limiter.count_tokens
        trace = request.scope["state"].get("trace")
        if trace is not None:
            trace.watch(log)
        return log

    def owner(self, request: Request) -> str:
        """Whose request it is: see ApiKeys. A line of a batch has the owner of its batch."""
        of_batch: str | None = request.scope.get("state", {}).get("owner")
        return self.keys.owner(dict(request.scope["headers"])) if of_batch is None else of_batch

    def visible_owner(self, request: Request) -> str | None:
        """Whose requests it may see and abort; None: all."""
        headers = dict(request.scope["headers"])
        return None if self.keys.sees_all(headers) else self.keys.owner(headers)

    @property
    def has_adapters(self) -> bool:
        """Whether requests may name a LoRA adapter as the model."""
        return self.manager.has_adapters

    def adapter_of(self, name: str | None) -> str:
        """The adapter that a request's model names, by itself or as ``model:adapter``; "": the base model.

        Only the router knows which adapters there are. A request with an unknown one fails there.
        """
        if name is None or not self.has_adapters or name in PLACEHOLDER_NAMES or name in self.model_names:
            return ""
        base, _, adapter = name.partition(":")
        if adapter and base in self.model_names:
            return adapter
        return "" if self.config.use_tgi_api else name  # TGI's clients send arbitrary names

    def shown_model(self, name: str | None) -> str:
        """The model in the response to a request that names this one."""
        return self.adapter_of(name) or self.model_name

    async def find_model(self, name: str | None) -> str:
        """``check_model`` and ``adapter_of``, for endpoints that do not generate: asks the router for an adapter."""
        self.check_model(name)
        adapter = self.adapter_of(name)
        if adapter:
            await self.manager.queries.find_adapter(adapter)
        return adapter

    def check_model(self, name: str | None) -> None:
        is_checked = not self.config.use_tgi_api  # TGI's clients send arbitrary names
        if not is_checked or name is None or name in PLACEHOLDER_NAMES or self.adapter_of(name):
            return
        if name == self.model_name or name in self.config.model_name:
            return
        names = ", ".join(map(repr, self.model_names))
        message = f"the model {name[:100]!r} does not exist; this server has {names} (--served-model-name adds names)"
        raise ModelNotFoundError(message, "model")

    def with_pinned_prefix(self, name: str | int | None, ids: list[int]) -> list[int]:
        """The prompt of a request whose task_id is ``name``."""
        if name is None:
            return ids
        static_ids = self.pinned_prefixes.get(str(name))
        if static_ids is None:
            names = ", ".join(map(repr, self.pinned_prefixes)) or "none"
            message = (
                f"task_id: there is no pinned prefix {str(name)[:100]!r}; this server has {names} (--pinned_prefixes)"
            )
            raise InvalidRequestError(message, "task_id")
        bos_id = None if self.optional_tokenizer is None else self.optional_tokenizer.bos_id
        return after_pinned_prefix(static_ids, ids, bos_id)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a prompt."""
        ids = await self._encode(self.tokenizer.encode, text, add_special_tokens)
        vocab_size = self.manager.limits.vocab_size
        if self.tokenizer.num_ids > vocab_size and max(ids, default=0) >= vocab_size:  # ids without an embedding
            raise InvalidRequestError(f"the text has the token id {max(ids)}; the model has {vocab_size} embeddings")
        return ids

    async def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, int, int]]:
        """The id of each token, and where it begins and ends in the text."""
        return await self._encode(self.tokenizer.encode_with_offsets, text, add_special_tokens)

    def least_tokens(self, text: str) -> int | None:
        """How many tokens a text has at least, if it need not be encoded to see that it does not fit; else None."""
        limit, longest = self.manager.limits.max_req_total_len, self.tokenizer.longest_token
        cannot_fit = len(text) > max(limit * longest, COUNTED_TEXT)
        return len(text) // longest if cannot_fit else None

    async def _encode(self, encode: Callable[[str, bool], list[T]], text: str, add_special_tokens: bool) -> list[T]:
        """Encode long text in a thread, and text that is much too long not at all."""
        if (at_least := self.least_tokens(text)) is not None:
            raise PromptTooLongError(at_least, self.manager.limits.max_req_total_len, is_lower_bound=True)
        if len(text) < LONG_TEXT:
            return encode(text, add_special_tokens)
        try:
            async with asyncio.timeout(ENCODE_LIMIT_S):
                return await asyncio.to_thread(encode, text, add_special_tokens)
        except TimeoutError as error:
            raise InvalidRequestError(f"the text takes longer than {ENCODE_LIMIT_S:.0f} s to tokenise") from error
