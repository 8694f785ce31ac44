"""One load of all weights, whose tensors come a few at a time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from lightserve.common.basemodel import CheckpointTensor
from lightserve.errors import ServerError


class Loadable(Protocol):
    def load_weights(
        self, checkpoint: Iterable[CheckpointTensor], report_missing: Callable[[int], None] = ...
    ) -> None: ...


class LoadCancelledError(ServerError):
    """The rest of the tensors will not come."""


class WeightLoad:
    """Runs ``load_weights`` in a thread, which waits for the next tensors.

    So the one pass that loads a checkpoint at the start also loads what a trainer sends in pieces.
    """

    def __init__(self, model: Loadable, in_thread: Callable[[], None] = lambda: None) -> None:
        """``in_thread`` is called first in the thread."""
        self.missing: int | None = None  # tensors that have not come; None: the model does not say it
        self._model = model
        self._in_thread = in_thread
        self._batches: queue.SimpleQueue[Sequence[CheckpointTensor] | BaseException | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()  # one for each batch
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="load weights", daemon=True)
        self._thread.start()

    def add(self, tensors: Sequence[CheckpointTensor]) -> None:
        """Write these tensors into the weights. Raises what ``load_weights`` raises; then the load has ended."""
        self._exchange(tensors)

    def finish(self) -> None:
        """All tensors have come."""
        self._exchange(None)
        self._thread.join()

    def cancel(self) -> None:
        """Some weights are new and others are not."""
        if self._thread.is_alive():
            self._batches.put(LoadCancelledError("the load was cancelled"))
            self._thread.join()

    def _exchange(self, batch: Sequence[CheckpointTensor] | None) -> None:
        if self._failure is None:
            self._batches.put(batch)
            self._failure = self._results.get()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._in_thread()
            self._model.load_weights(self._tensors(), self._report_missing)
        except BaseException as error:
            self._results.put(error)
        else:
            self._results.put(None)

    def _report_missing(self, count: int) -> None:
        self.missing = count

    def _tensors(self) -> Iterator[CheckpointTensor]:
        while (batch := self._batches.get()) is not None:
            if isinstance(batch, BaseException):
                raise batch
            yield from batch
            del batch
            self._results.put(None)  # the last tensor of the batch has been written
