"""Has the grammar of a request compiled before it goes to the engine, so that a bad one is a status 400."""

from __future__ import annotations

import asyncio
import tempfile
from collections import OrderedDict
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import msgspec

from lightserve.errors import InvalidRequestError, UnavailableError
from lightserve.httpserver.grammar.process import GrammarProcess
from lightserve.ipc.codec import encode
from lightserve.messages.params import GrammarSpec
from lightserve.model_files.tokenizer.tokenizer import Tokenizer
from lightserve.text.grammar.messages import GrammarReport
from lightserve.text.grammar.vocabulary import GrammarVocabulary

MAX_COMPILING = 64  # grammars that are being compiled or wait for it
MAX_REPORTS = 4096  # of the last grammars, a few hundred bytes each


class GrammarCheck:
    """Another process compiles: see grammar/process.py. Its reports are cached."""

    def __init__(self, path: str | None = None) -> None:
        """``path``: where the process listens; None: in a folder of its own."""
        self._path = path
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: GrammarProcess | None = None
        self._reports: OrderedDict[bytes, GrammarReport] = OrderedDict()  # by the hash of a grammar
        self._compiling: dict[bytes, asyncio.Task[GrammarReport]] = {}

    def prepare(self, tokenizer: Tokenizer) -> None:
        """Start the process before requests come. It reads the vocabulary meanwhile."""
        with suppress(InvalidRequestError):  # there are no grammars for it: requests with one are told why
            self._process_for(tokenizer)

    async def check(self, tokenizer: Tokenizer, spec: GrammarSpec) -> GrammarSpec:
        """The grammar with the memory that it takes. InvalidRequestError if it cannot be compiled.

        UnavailableError if there are too many others.
        """
        report = await self._report(tokenizer, spec)
        if report.error:
            raise InvalidRequestError(report.error)
        return msgspec.structs.replace(spec, memory_mib=report.memory_mib)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
        if self._folder is not None:
            self._folder.cleanup()

    async def _report(self, tokenizer: Tokenizer, spec: GrammarSpec) -> GrammarReport:
        key = blake2b(encode(spec), digest_size=16).digest()
        if key in self._reports:
            self._reports.move_to_end(key)
            return self._reports[key]
        if key not in self._compiling:
            if len(self._compiling) >= MAX_COMPILING:
                raise UnavailableError(f"{MAX_COMPILING} grammars are being compiled; try again")
            self._compiling[key] = compiling = asyncio.create_task(self._compile(tokenizer, spec, key))
            compiling.add_done_callback(lambda task: task.cancelled() or task.exception())  # all may have left
        return await asyncio.shield(self._compiling[key])  # others may wait for it too

    async def _compile(self, tokenizer: Tokenizer, spec: GrammarSpec, key: bytes) -> GrammarReport:
        try:
            report = await self._process_for(tokenizer).compile(spec)
        finally:
            del self._compiling[key]
        self._reports[key] = report
        while len(self._reports) > MAX_REPORTS:
            self._reports.popitem(last=False)
        return report

    def _process_for(self, tokenizer: Tokenizer) -> GrammarProcess:
        if self._process is None:
            if self._path is None:
                self._folder = tempfile.TemporaryDirectory(prefix="ls-grammar-")
                self._path = str(Path(self._folder.name) / "grammar")
            self._process = GrammarProcess(GrammarVocabulary.of(tokenizer), self._path)
        return self._process
