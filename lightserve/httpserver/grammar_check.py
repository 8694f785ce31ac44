"""Compiles the grammar of a request before it goes to the engine, so that a bad one is a status 400."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

from lightserve.errors import InvalidRequestError
from lightserve.grammar.compiler import GrammarCompiler
from lightserve.grammar.vocabulary import GrammarVocabulary
from lightserve.io_struct import GrammarSpec
from lightserve.model_files.tokenizer import Tokenizer

COMPILE_LIMIT_S = 5.0  # most take milliseconds; the limits of grammar/compiler.py end nearly all others within a second
THREADS = 2


class GrammarCheck:
    """Compiles in its own threads; the compiler caches the last grammars."""

    def __init__(self) -> None:
        self._compiler: GrammarCompiler | None = None
        self._threads = ThreadPoolExecutor(THREADS, "grammar")

    def prepare(self, tokenizer: Tokenizer) -> None:
        """Read the vocabulary before requests come, while no other thread runs."""
        with contextlib.suppress(InvalidRequestError):  # raised again for every request with a grammar
            self._compiler_for(tokenizer)

    async def check(self, tokenizer: Tokenizer, spec: GrammarSpec) -> None:
        """Raise InvalidRequestError if the grammar cannot be compiled."""
        compiler = self._compiler_for(tokenizer)
        if compiler.find(spec) is not None:
            return
        compiling = asyncio.get_running_loop().run_in_executor(self._threads, compiler.compile, spec)
        try:
            await asyncio.wait_for(compiling, COMPILE_LIMIT_S)
        except TimeoutError as error:
            raise InvalidRequestError(f"the grammar takes longer than {COMPILE_LIMIT_S:.0f} s to compile") from error

    def _compiler_for(self, tokenizer: Tokenizer) -> GrammarCompiler:
        if self._compiler is None:
            self._compiler = GrammarCompiler(GrammarVocabulary.of(tokenizer))
        return self._compiler
