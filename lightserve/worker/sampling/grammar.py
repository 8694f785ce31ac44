"""The grammars of a worker's requests: compilation, the state of each request, and masks of the allowed tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache, partial

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par, get_bitmask_shape
from torch import Tensor

from lightserve.common.device import host_memory
from lightserve.errors import InvalidRequestError
from lightserve.messages.int_arrays import GrowingArray, int32s
from lightserve.messages.params import GrammarSpec
from lightserve.messages.step import NewReq
from lightserve.model_files.source import ModelSource
from lightserve.model_files.tokenizer.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from lightserve.text.grammar.compiler import STACK_BYTES, GrammarCompiler, mask_of
from lightserve.text.grammar.vocabulary import GrammarVocabulary
from lightserve.utils.cpu import available_cores
from lightserve.utils.memory import allocated_bytes
from lightserve.utils.threads import pool_with_stack
from lightserve.worker.sampling.req_rules import ReqRules

MAX_THREADS = 8  # for the masks of a step: 32 of one JSON schema take 1.1 ms of a slow core, one after the other
# Matchers of one compiled grammar share a lexer, which only one mask at a time can use. So every grammar is compiled
# once per lane, and a lane takes eight requests in turn. One more lane takes 0.6 ms for a schema of three fields and
# 9 ms for 18 kB of schema.
LANES = 4
LANE_REQS = 8
LARGE_MIB = 4  # a larger grammar has one lane
MAX_GROWTH_BYTES = 2**30  # of the heap, after which all cached grammars are dropped: their lexers grow while in use
CPU = torch.device("cpu")
NO_TOKEN_LEFT = (
    "no token is left that the request's rules allow; relax its allowed tokens, bad words, no_repeat_ngram_size, "
    "min_new_tokens or grammar"
)
TOO_COMPLEX = "the grammar is too complex for so long a text; simplify its patterns and lengths"


class ReqGrammar:
    """The state of a request in its grammar. One thread uses it at a time: see collector.py."""

    def __init__(
        self,
        matcher: Future[LLMatcher],
        is_prefix: bool = False,
        lexer_id: int = 0,
        discard: Callable[[], None] = lambda: None,
    ) -> None:
        """``is_prefix``: any text may follow after a text of the grammar. ``discard`` drops the compiled grammar."""
        self.lexer_id = lexer_id  # matchers with the same one share a lexer
        self.error: str | None = None  # why no token may follow
        self.is_unconstrained = False  # any token may follow
        self._is_prefix = is_prefix
        self._compiled = matcher
        self._discard = discard
        self._matcher: LLMatcher | None = None

    @property
    def matcher(self) -> LLMatcher | None:
        """Waits for the compilation. None if it failed with ``error``, or if ``is_unconstrained``."""
        if self._matcher is None and self.error is None and not self.is_unconstrained:
            try:
                self._matcher = self._compiled.result()
                self._check_end()
            except InvalidRequestError as error:
                self.error = str(error)
        return self._matcher

    @property
    def is_complete(self) -> bool:
        """Whether the output is complete and no token may follow."""
        return self._matcher is not None and self.error is None and self._matcher.is_stopped()

    def copy(self) -> ReqGrammar:
        """One that can go ahead of the request. It shares the lexer only."""
        matcher = self.matcher
        copied = ReqGrammar(self._compiled, self._is_prefix, self.lexer_id)
        copied._matcher = None if matcher is None else matcher.deep_copy()
        copied.error, copied.is_unconstrained = self.error, self.is_unconstrained
        return copied

    def allows(self, token_id: int) -> bool:
        """Whether this token may follow."""
        if self.is_unconstrained:
            return True
        matcher = self.matcher
        if matcher is None or token_id < 0 or matcher.is_stopped():
            return False
        return matcher.validate_tokens([token_id]) == 1

    def forced(self) -> list[int]:
        """The tokens of the only text that may follow. Empty if several may."""
        matcher = self.matcher
        if matcher is None or self.error is not None or matcher.is_stopped():
            return []
        tokens = matcher.compute_ff_tokens()
        # they are wrong if the vocabulary lacks a byte of the text
        return tokens[: matcher.validate_tokens(tokens)] if tokens else tokens

    def advance(self, token_id: int) -> None:
        """Append a token of the request. One that the grammar does not allow sets ``error``."""
        matcher = self.matcher
        if matcher is None or self.error is not None:
            return
        is_ended = matcher.is_stopped() and not matcher.is_error()
        if not is_ended and not matcher.consume_token(token_id):  # a step samples token 0 if a mask allows no token
            self._fail(matcher.get_error())
        self._check_end()

    def _fail(self, reason: str) -> None:
        """All requests with the grammar share the lexer. If it has reached a limit, new ones need another."""
        is_forbidden = "doesn't satisfy the grammar" in reason
        self.error = NO_TOKEN_LEFT if is_forbidden else f"{TOO_COMPLEX} ({reason.splitlines()[0]})"
        self._discard()

    def _check_end(self) -> None:
        if self._is_prefix and self._matcher is not None and self._matcher.is_accepting():
            self.is_unconstrained, self._matcher = True, None


class GrammarOutput:
    """The collected tokens of a request with a grammar. It belongs to the collector of results."""

    def __init__(self, new: NewReq, grammar: ReqGrammar) -> None:
        sampling = new.sampling
        self._grammar = grammar
        self._rules = ReqRules(sampling, new.stopping, new.eos_ids)  # not shared: it keeps what n-grams it has seen
        self._tokens = GrowingArray(new.token_ids)
        self._may_force = sampling.logprobs is None and sampling.thinking is None  # both need a step for each token

    @property
    def is_unconstrained(self) -> bool:
        """Whether any token may follow."""
        return self._grammar.is_unconstrained

    @property
    def error(self) -> str | None:
        """Why the last token is not allowed, if so."""
        return self._grammar.error

    def add(self, token_id: int) -> bool:
        """Append a sampled token. Returns whether it completes the grammar."""
        self._grammar.advance(token_id)
        self._tokens.extend((token_id,))
        return self._grammar.is_complete

    def forced(self) -> Iterator[tuple[int, bool]]:
        """Append the tokens of the only text that may follow. Yields each, and whether it completes the grammar.

        It stops before a token that another rule forbids. The next step then samples, and finds that no token is left.
        """
        for token_id in self._grammar.forced() if self._may_force else ():
            if self.is_unconstrained or not self._rules.permits(token_id, self._tokens.view):
                break
            is_complete = self.add(token_id)
            yield token_id, is_complete
            if is_complete:
                break


class GrammarManager:
    """Compiles the grammars of a worker's requests, and makes the masks of its steps."""

    def __init__(self, source: ModelSource, vocab_size: int, device: torch.device = CPU) -> None:
        """``device``: the masks are copied to it."""
        self._source = source
        self._device = device
        self._vocab_size = vocab_size
        self._mask_vocab_size = vocab_size  # the tokenizer may have more tokens than the model
        self._executor_of = lru_cache(maxsize=None)(LLExecutor)  # by the number of threads
        self._compilers_of = lru_cache(maxsize=2)(self._make_compilers)  # by end tokens; a server uses one set
        self._lanes = min(available_cores(), LANES)
        self._started = 0
        self._allocated_before = allocated_bytes()  # the first grammars, or the last time that all were dropped
        self._lock = threading.Lock()  # for the compilers and _compiling
        self._compiling: dict[Hashable, list[Future[LLMatcher]]] = {}  # by grammar and end tokens

    def warm_up(self) -> None:
        """Read the vocabulary in a thread, before a request needs it."""
        if has_tokenizer(self._source):
            eos_ids = self._source.eos_token_ids()
            eos_ids = tuple(token for token in eos_ids if token < self._vocab_size)
            self._start_thread.submit(self._compilers_for, eos_ids)

    def compile_grammar(self, spec: GrammarSpec, eos_ids: tuple[int, ...]) -> None:
        """Compile a grammar for all lanes, and wait for it. InvalidRequestError says what is wrong with it."""
        if any(compiler.find(spec) is None for compiler in self._compilers_of_spec(spec, eos_ids)):
            self._limit_growth(eos_ids)
            for compiled in self._compile(spec, eos_ids):
                compiled.result()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text."""
        return self._tokenizer.decoder.token_bytes(token_id)

    def start(self, new: NewReq) -> ReqGrammar | None:
        """The grammar of a new request, advanced by the output that it has already. A thread compiles it."""
        sampling = new.sampling
        if sampling.grammar is None:
            return None
        spec = sampling.grammar
        output_ids: list[int] = int32s(new.token_ids[len(new.token_ids) - new.output_len :]).tolist()
        lane = self._started // LANE_REQS % self._lanes_of(spec)
        self._started += 1
        compiled = self._start_thread.submit(self._matcher_after, spec, new.eos_ids, output_ids, lane)
        discard = partial(self._discard, spec, new.eos_ids, lane)
        return ReqGrammar(compiled, spec.kind == "prefix", hash((spec, lane)), discard)

    def masks(self, grammars: Sequence[ReqGrammar | None], forbidden: Sequence[tuple[int, ...]]) -> Tensor:
        """The tokens that may follow in each of ``grammars`` (None: all): int32 ``[grammars, words]``, a bit per token.

        They are in host memory that the device can copy from. ``forbidden``: tokens that may not come, unless the
        grammar allows no other.
        """
        matchers = [None if grammar is None else grammar.matcher for grammar in grammars]
        shape = get_bitmask_shape(len(grammars), self._mask_vocab_size)  # known once a grammar is compiled
        masks = host_memory(shape, torch.int32, self._device)
        bitmask = masks.numpy()
        jobs = []
        for i, (grammar, matcher) in enumerate(zip(grammars, matchers, strict=True)):
            if grammar is None or matcher is None:
                bitmask[i] = -1
            else:
                jobs.append((grammar.lexer_id, i, matcher))
        self._fill(bitmask, jobs)
        words = bitmask.view(np.uint32)
        for _, i, _ in jobs:
            if any(_allows(words, i, token_id) for token_id in forbidden[i]):  # rarely
                _forbid(words[i], forbidden[i])
        return masks

    def _fill(self, bitmask: np.ndarray, jobs: list[tuple[int, int, LLMatcher]]) -> None:
        """``jobs``: lexer, row and matcher.

        Two threads that use one lexer wait for each other. So there are as many threads as lexers, and jobs are sorted
        by lexer.
        """
        if not jobs:
            return
        lexers = {lexer for lexer, _, _ in jobs}
        executor = self._executor_of(min(len(lexers), available_cores(), MAX_THREADS))
        fill_next_token_bitmask_par(executor, [(matcher, row) for _, row, matcher in sorted(jobs)], bitmask)

    @cached_property
    def _compile_threads(self) -> ThreadPoolExecutor:
        return pool_with_stack(self._lanes, "compile-grammar", STACK_BYTES)

    @cached_property
    def _start_thread(self) -> ThreadPoolExecutor:
        """Not behind the compilation of other grammars."""
        return pool_with_stack(1, "start-grammar", STACK_BYTES)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if not has_tokenizer(self._source):
            raise InvalidRequestError("this model has no tokenizer, which a grammar needs")
        return load_tokenizer(self._source)

    def _matcher_after(
        self, spec: GrammarSpec, eos_ids: tuple[int, ...], output_ids: list[int], lane: int
    ) -> LLMatcher:
        matcher = self._matcher(spec, eos_ids, lane)
        if spec.kind == "prefix":
            output_ids = _before_end(matcher, output_ids)
        if not matcher.consume_tokens(output_ids):
            raise InvalidRequestError(f"the grammar does not allow the request's output: {matcher.get_error()[:200]}")
        return matcher

    def _matcher(self, spec: GrammarSpec, eos_ids: tuple[int, ...], lane: int) -> LLMatcher:
        """At the start of the grammar. What is not compiled yet is compiled for all lanes."""
        compiler = self._compilers_for(eos_ids)[lane]
        matcher = compiler.find(spec)
        if matcher is not None:
            return matcher
        self._compile(spec, eos_ids)[lane].result()
        return compiler.compile(spec)

    def _compile(self, spec: GrammarSpec, eos_ids: tuple[int, ...]) -> list[Future[LLMatcher]]:
        """Compile a grammar for every lane in the background. llguidance releases the GIL meanwhile."""
        compilers, key = self._compilers_of_spec(spec, eos_ids), (spec, eos_ids)
        with self._lock:
            self._compiling = {key: lanes for key, lanes in self._compiling.items() if not all(map(Future.done, lanes))}
            if key not in self._compiling:
                self._compiling[key] = [self._compile_threads.submit(lane.compile, spec) for lane in compilers]
            return self._compiling[key]

    def _discard(self, spec: GrammarSpec, eos_ids: tuple[int, ...], lane: int) -> None:
        self._compilers_for(eos_ids)[lane].discard(spec)

    def _limit_growth(self, eos_ids: tuple[int, ...]) -> None:
        """The cache counts the memory of grammars as they were compiled. This is a limit on what they grow to."""
        allocated = allocated_bytes()
        if allocated - self._allocated_before > MAX_GROWTH_BYTES:
            for compiler in self._compilers_for(eos_ids):
                compiler.clear_cache()
            self._allocated_before = allocated_bytes()

    def _lanes_of(self, spec: GrammarSpec) -> int:
        return 1 if spec.memory_mib > LARGE_MIB else self._lanes

    def _compilers_of_spec(self, spec: GrammarSpec, eos_ids: tuple[int, ...]) -> list[GrammarCompiler]:
        return self._compilers_for(eos_ids)[: self._lanes_of(spec)]

    def _compilers_for(self, eos_ids: tuple[int, ...]) -> list[GrammarCompiler]:
        """One per lane. The first call reads the vocabulary, which takes 0.3 s for 50,000 tokens and holds the GIL."""
        with self._lock:
            return self._compilers_of(eos_ids)

    def _make_compilers(self, eos_ids: tuple[int, ...]) -> list[GrammarCompiler]:
        compiler = GrammarCompiler(GrammarVocabulary.of(self._tokenizer, self._vocab_size, eos_ids))
        self._mask_vocab_size = compiler.vocab_size
        return compiler.lanes(self._lanes)


def _before_end(matcher: LLMatcher, output_ids: list[int]) -> list[int]:
    """The tokens up to the one that completes the prefix."""
    ahead = matcher.deep_copy()
    for count, token_id in enumerate(output_ids, start=1):
        if not ahead.consume_token(token_id) or ahead.is_accepting():
            return output_ids[:count]
    return output_ids


def _allows(masks: np.ndarray, row: int, token_id: int) -> bool:
    return token_id < 32 * masks.shape[1] and bool(masks.item(row, token_id // 32) >> token_id % 32 & 1)


def _forbid(mask: np.ndarray, token_ids: tuple[int, ...]) -> None:
    rest = mask & ~mask_of(token_ids, 32 * len(mask))
    if rest.any():
        mask[:] = rest
