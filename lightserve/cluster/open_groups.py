"""The prompts of open groups: a beam search sends only what follows the prompt of an earlier request.

An engine may not know the earlier request, so the dispatcher makes the prompt whole again.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightserve.messages.int_arrays import Int32Array, int32s
from lightserve.messages.request import GenerateReq, http_process_of


class OpenGroups:
    def __init__(self) -> None:
        self._prompts: dict[int, Int32Array] = {}  # by request, until its HTTP process releases it

    def __len__(self) -> int:
        return len(self._prompts)

    def with_prompt(self, message: GenerateReq) -> GenerateReq | None:
        """The request with its whole prompt; None: its parent is not known."""
        if message.parent is not None:
            if message.parent not in self._prompts:
                return None
            message = message.after(self._prompts[message.parent])
        if message.is_group_open:
            self._prompts[message.req_id] = int32s(message.prompt_ids)
        return message

    def release(self, req_ids: Iterable[int]) -> None:
        """No request will name these as its parent any more."""
        for req_id in req_ids:
            self._prompts.pop(req_id, None)

    def of_process(self, process: int) -> list[int]:
        """The requests of an HTTP process."""
        return [req_id for req_id in self._prompts if http_process_of(req_id) == process]
