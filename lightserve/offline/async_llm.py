"""``AsyncLLM``: an LLM for programs with an event loop. Requests of all tasks are batched together.

The LLM lives in a thread of its own, which takes a token of each stream in turn. The first stream that has none runs a
step, and the step gives tokens to all.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from lightserve.errors import ServerError
from lightserve.offline.llm import LLM, Loras, Params, Prompt
from lightserve.offline.results import Generation, StreamOut

Begin = Callable[[LLM], Iterator[Any]]


@dataclass(slots=True, eq=False)
class _Stream:
    """What a task waits for: its items, then None, or an exception."""

    begin: Begin
    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    iterator: Iterator[Any] | None = None
    is_closed: bool = False  # set by the task, which has left

    def put(self, item: Any) -> None:
        with suppress(RuntimeError):  # the loop of the task has ended
            self.loop.call_soon_threadsafe(self.items.put_nowait, item)


class AsyncLLM:
    """With the options of LLM. The constructor returns when the model is loaded."""

    def __init__(self, model_dir: str | None = None, **options: Any) -> None:
        self._inbox: queue.SimpleQueue[_Stream | None] = queue.SimpleQueue()  # None: close
        self._is_closed = False
        self._loaded: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        arguments = (lambda: LLM(model_dir, **options),)
        self._thread = threading.Thread(target=self._work, args=arguments, name="lightserve-llm", daemon=True)
        self._thread.start()
        if (error := self._loaded.get()) is not None:
            raise error

    async def stream(
        self, prompt: Prompt, params: Params = None, *, lora: Loras = None, **fields: Any
    ) -> AsyncIterator[StreamOut]:
        """Every token of one prompt as it comes. Leaving the loop ends the request."""

        def begin(llm: LLM) -> Iterator[StreamOut]:
            return llm.stream(prompt, params, lora=lora, **fields)

        async with aclosing(self._items(begin)) as items:
            async for out in items:
                yield out

    generate_stream = stream

    async def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, lora: Loras = None, **fields: Any
    ) -> list[Generation]:
        """As in LLM."""
        return await self._result(lambda llm: llm.generation_steps(prompts, params, lora=lora, **fields))

    async def chat(
        self, messages: Any, params: Params = None, *, lora: Loras = None, **fields: Any
    ) -> list[Generation]:
        """The answers to a conversation, or to each of a list of them."""
        fields = {"continues_text": False} | fields
        return await self._result(
            lambda llm: llm.generation_steps(llm.chat_prompts(messages), params, lora=lora, **fields)
        )

    async def close(self) -> None:
        """End all requests and free the memory of the model."""
        if not self._is_closed:
            self._is_closed = True
            self._inbox.put(None)
            await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def _result(self, begin: Begin) -> list[Generation]:
        """The last item."""
        result: Any = []
        async with aclosing(self._items(begin)) as items:
            async for item in items:
                result = item if item is not None else result
        return list(result)

    async def _items(self, begin: Begin) -> AsyncGenerator[Any, None]:
        if self._is_closed:
            raise ServerError("this LLM is closed; make another one")
        stream = _Stream(begin, asyncio.get_running_loop())
        self._inbox.put(stream)
        try:
            while True:
                item = await stream.items.get()
                if item is _END:
                    return
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stream.is_closed = True

    def _work(self, load: Callable[[], LLM]) -> None:
        try:
            llm = load()
        except BaseException as error:  # the constructor raises it
            self._loaded.put(error)
            return
        self._loaded.put(None)
        with llm:
            streams: list[_Stream] = []
            while self._take_new(streams):
                streams = [stream for stream in streams if _advance(stream, llm)]
            for stream in streams:
                stream.put(ServerError("the LLM was closed"))

    def _take_new(self, streams: list[_Stream]) -> bool:
        """False: the LLM is closed. Waits if there is nothing to do."""
        while not streams or not self._inbox.empty():
            stream = self._inbox.get()
            if stream is None:
                return False
            streams.append(stream)
        return True


_END = object()


def _advance(stream: _Stream, llm: LLM) -> bool:
    """Give a stream its next item. Whether it goes on."""
    try:
        if stream.iterator is None:
            stream.iterator = stream.begin(llm)
        if stream.is_closed:
            stream.iterator.close()  # type: ignore[attr-defined]  # a generator
            return False
        stream.put(next(stream.iterator))
    except StopIteration:
        stream.put(_END)
        return False
    except Exception as error:  # of this request, or of a step that it shared
        stream.put(error)
        return False
    return True
