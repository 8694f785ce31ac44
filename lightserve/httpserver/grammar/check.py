"""Has the grammar of a request compiled before it goes to the engine, so that a bad one is a status 400."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections import OrderedDict
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import msgspec

from lightserve.errors import InvalidRequestError, UnavailableError
from lightserve.ipc.codec import encode, make_decode
from lightserve.messages.params import GrammarSpec
from lightserve.model_files.tokenizer.tokenizer import Tokenizer
from lightserve.text.grammar.vocabulary import STARTED, GrammarReport, GrammarVocabulary
from lightserve.utils.logger import init_logger

MAX_COMPILING = 64  # grammars that are being compiled or wait for it
MAX_REPORTS = 4096  # of the last grammars, a few hundred bytes each
logger = init_logger(__name__)

MODULE = "lightserve.text.grammar.process"
WAIT_LIMIT_S = 30.0  # until a compilation begins: others may come before it, and the process may be starting
REPLY_LIMIT_S = 60.0  # for COMPILE_LIMIT_S of CPU time on a busy machine
ATTEMPTS = 3
_RETRY_S = 0.1
KILLED = GrammarReport("the grammar is too deep or too large: it ended the process that compiled it; simplify it")
_decode_report = make_decode(GrammarReport)


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
        """Write the vocabulary down, which takes a while."""
        with suppress(InvalidRequestError):  # there are no grammars for it: requests with one are told why
            self._process_for(tokenizer)

    def start(self) -> None:
        """Start the process before a request needs it, but after those that the server waits for: it takes 0.6 s."""
        if self._process is not None:
            self._process.start()

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


class GrammarProcess:
    """It ends with this process. It is started for the first grammar, and if it dies, again for the next one."""

    def __init__(self, vocabulary: GrammarVocabulary, path: str) -> None:
        """It listens at ``path``."""
        self._path = path
        self._vocabulary = _memory_file(encode(vocabulary))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Unless it runs."""
        if self._process is None:
            self._process = self._start()
        elif self._process.poll() is not None:
            logger.warning("the process that compiles grammars died (%s); starting it again", self._process.returncode)
            self._forget(self._process)
            self._process = self._start()

    async def compile(self, spec: GrammarSpec) -> GrammarReport:
        """UnavailableError if there was no time for it, or no process."""
        for attempt in range(ATTEMPTS):
            self.start()
            try:
                return await self._compile(spec)
            except ConnectionError:  # the process has died, and not of this grammar
                await asyncio.sleep(attempt * _RETRY_S)
            except TimeoutError as error:
                raise UnavailableError("too many grammars are being compiled; try again") from error
        raise UnavailableError("the process that compiles grammars has died; try again")

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget(self._process)
        os.close(self._vocabulary)
        with suppress(FileNotFoundError):
            os.unlink(self._path)

    async def _compile(self, spec: GrammarSpec) -> GrammarReport:
        reader, writer = await asyncio.open_unix_connection(self._path)
        try:
            writer.write(encode(spec))
            writer.write_eof()
            async with asyncio.timeout(WAIT_LIMIT_S):
                has_started = await reader.read(len(STARTED)) == STARTED
            async with asyncio.timeout(REPLY_LIMIT_S):
                answer = await reader.read()
            if not answer and (not has_started or self._has_died):
                raise ConnectionResetError  # another reason than this grammar
            return _decode_report(answer) if answer else KILLED
        finally:
            writer.close()

    @property
    def _has_died(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def _start(self) -> subprocess.Popen[bytes]:
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        os.lseek(self._vocabulary, 0, os.SEEK_SET)
        with socket.socket(socket.AF_UNIX) as listener:  # a client that connects early waits until all is imported
            listener.bind(self._path)
            listener.listen(socket.SOMAXCONN)
            fds = (listener.fileno(), self._vocabulary)
            command = [sys.executable, "-m", MODULE, *map(str, fds)]
            env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # it forks, and needs no threads
            return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=fds, env=env)

    @staticmethod
    def _forget(process: subprocess.Popen[bytes]) -> None:
        if process.stdin is not None:
            process.stdin.close()


def _memory_file(content: bytes) -> int:
    """A descriptor of a file with this content, which is nowhere on a disk if the system can do that."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("vocabulary")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    return fd
