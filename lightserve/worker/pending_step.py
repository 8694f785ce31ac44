"""A step that was launched and whose tokens the host may not know yet."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

from lightserve.common import ops
from lightserve.common.device import ToHost
from lightserve.io_struct import PromptLogprobs, ReqFailed, StepResult, Token, TokenOut
from lightserve.worker.infer_batch import InferReq
from lightserve.worker.sampling.prompt_logprobs import joined
from lightserve.worker.sampling.sampler import NOT_ASKED, StepLogprobs

NOT_NUMBERS = "numerical error: the model's logits for the next token are not finite numbers"


class PendingStep:
    """``chosen``: the rows of ``tokens`` that are a request's next; the others belong to unfinished prompts.

    ``before``: the step that was launched before this one, whose tokens come first.
    """

    def __init__(
        self,
        tokens: Tensor,
        chosen: Sequence[tuple[int, InferReq]],
        logprobs: StepLogprobs | None,
        before: PendingStep | None,
    ) -> None:
        self._before = before
        self._tokens = ToHost(tokens)
        self._chosen = chosen
        self._logprobs = logprobs
        self._lock = threading.Lock()  # the next step may need the tokens before the router asks
        self._result: StepResult | None = None

    def collect(self) -> StepResult:
        """Wait for the tokens, and give each to its request once, after those of the steps before.

        A thread waits for each step, and where steps are short, that of a later one may be here first.
        """
        with self._lock:
            if self._result is None:
                if self._before is not None:
                    self._before.collect()
                    self._before = None
                self._result = self._take()
            return self._result

    def _take(self) -> StepResult:
        (tokens,) = self._tokens.tensors()
        ids: list[int] = tokens.tolist()
        logprobs = {} if self._logprobs is None else self._logprobs.by_row()
        outs: list[TokenOut] = []
        failed: list[ReqFailed] = []
        for row, req in self._chosen:
            if ids[row] == ops.NO_TOKEN:
                failed.append(_without_token(req))
                continue
            is_complete, error = _advance(req, ids[row], req.token_ids)
            if error is None:
                token = Token(ids[row], *logprobs.get(row, NOT_ASKED), prompt_logprobs=_take_prompt(req))
                outs.append(TokenOut(req.req_id, token, completes_grammar=is_complete))
            else:
                failed.append(ReqFailed(req.req_id, 400, error))
            forced = _forced(req, ids[row])
            req.append(ids[row], [out.token.id for out in forced])
            outs += forced
        return StepResult(outs, failed)


def _without_token(req: InferReq) -> ReqFailed:
    """The next step may be under way: for it token 0 stands in, as in ``ops.place_tokens``."""
    req.token_ids.append(0)
    return ReqFailed(req.req_id, 500, NOT_NUMBERS)


def _take_prompt(req: InferReq) -> PromptLogprobs | None:
    """The logprobs of its prompt, where it asked for them, once."""
    parts, req.prompt_parts = req.prompt_parts, None
    return None if parts is None else joined(parts, req.sampling.prompt_logprobs or 0)


def _advance(req: InferReq, token_id: int, before: list[int]) -> tuple[bool, str | None]:
    """Whether this token completes the request's grammar, and why it may not be there."""
    grammar = req.grammar
    if grammar is None:
        return False, None
    is_first = len(before) == req.prompt_len
    grammar.advance(token_id, is_permitted=req.rules.permits(token_id, before, is_first))
    return grammar.is_complete, grammar.error


def _forced(req: InferReq, chosen: int) -> list[TokenOut]:
    """What comes after ``chosen`` in any case, and need not be sampled.

    Nothing where logprobs are asked for, or where thinking may have to end. It ends before a token that another rule
    forbids: to sample that one finds nothing left.
    """
    if req.grammar is None or req.sampling.logprobs is not None or req.thinking is not None:
        return []
    outs: list[TokenOut] = []
    forced = req.grammar.forced()
    token_ids = [*req.token_ids, chosen] if forced else []
    for token_id in forced:
        if req.grammar.is_over or not req.rules.permits(token_id, token_ids, is_first=False):
            break
        is_complete, _ = _advance(req, token_id, token_ids)
        token_ids.append(token_id)
        outs.append(TokenOut(req.req_id, Token(token_id), completes_grammar=is_complete, is_forced=True))
    return outs
