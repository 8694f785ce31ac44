"""The columns of a worker's requests, against a simple model of the same requests."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch

from lightserve.common.kv.req_manager import ReqManager
from lightserve.common.ops.step import LAST_SAMPLED
from lightserve.messages.int_arrays import BLOCK, int32s, int64s
from lightserve.messages.params import SamplingParams
from lightserve.messages.step import NewReq, Step, StepResult, StepRow
from lightserve.worker.batch.infer_batch import InferBatch
from lightserve.worker.batch.step_input import StepColumns, columns_of
from lightserve.worker.collector import PendingStep, StepCollector
from lightserve.worker.rpc import GetResult

CPU = torch.device("cpu")
MAX_REQS = 6


@dataclass
class ModelReq:
    """``tokens``: all, also the sampled ones that the batch does not know yet."""

    tokens: list[int]
    known: int
    sampling: SamplingParams
    slots: list[int] = field(default_factory=list)


class Worker:
    """Runs steps of random requests in a batch and in the model, with up to two in flight."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.batch = InferBatch(ReqManager(MAX_REQS, 4000, CPU), 9999, CPU)
        self.collector = StepCollector()
        self.reqs: dict[int, ModelReq] = {}
        self.in_flight: list[tuple[GetResult, dict[int, int]]] = []
        self.queued: list[dict[int, int]] = []  # requests that got a token, whose tokens are not applied yet
        self.next_id = self.next_slot = 0
        self.entered: dict[int, int] = {}  # by request: which entry of it

    def launch(self) -> None:
        self.batch.apply(self.collector.take_updates())
        for got in self.queued:
            for req_id, entry in got.items():
                if self.entered.get(req_id) == entry:
                    self.reqs[req_id].known += 1
        self.queued.clear()
        self._change_requests()
        step, counts = self._step()
        if not counts:
            return
        before = {req_id: (len(req.slots), req.known, list(req.tokens)) for req_id, req in self.reqs.items()}
        packed = self.batch.pack(step, lambda shape: shape)
        self._check(columns_of(packed.inputs, packed.shape), [req.req_id for req in packed.reqs], counts, before)
        ids = [self.rng.randrange(100) for _ in packed.reqs]
        sampled = self.batch.take_sampled(packed)
        sampled_entries: dict[int, int] = {}
        for req, token in zip(packed.reqs, ids, strict=True):
            own = self.reqs[req.req_id]
            if len(own.slots) == len(own.tokens):
                own.tokens.append(token)
                sampled_entries[req.req_id] = self.entered[req.req_id]
        self.in_flight.append((self.collector.add(PendingStep(torch.tensor(ids), sampled, None)), sampled_entries))

    def collect(self) -> StepResult:
        collect, got = self.in_flight.pop(0)
        self.queued.append(got)
        result = collect()
        assert {out.req_id for out in result.tokens} == set(got)
        for out in result.tokens:
            if self.entered.get(out.req_id) == got[out.req_id]:
                assert out.token.id in self.reqs[out.req_id].tokens
        return result

    def _change_requests(self) -> None:
        for req_id in [one for one in self.reqs if self.rng.random() < 0.01]:
            self.batch.remove(req_id)
            del self.reqs[req_id], self.entered[req_id]
        while len(self.reqs) < MAX_REQS and self.rng.random() < 0.5:
            prompt = [self.rng.randrange(100) for _ in range(self.rng.choice((1, 2, 9)))]
            sampling = SamplingParams(
                temperature=self.rng.choice((0.0, 0.5)), logprobs=self.rng.choice((None, None, 0))
            )
            self.next_id += 1
            req_id = self.next_id
            cached = [self._slot() for _ in range(self.rng.randrange(len(prompt)))]
            self.batch.add(NewReq(req_id, int32s(prompt), sampling, seed=2**62 + req_id, cached_slots=int32s(cached)))
            self.reqs[req_id] = ModelReq(prompt, len(prompt), sampling, cached)
            self.entered[req_id] = req_id

    def _step(self) -> tuple[Step, dict[int, int]]:
        """One token of each request that has one to compute, or a chunk of several."""
        left = {req_id: len(req.tokens) - len(req.slots) for req_id, req in self.reqs.items()}
        decodes = [req_id for req_id, count in left.items() if count == 1 and self.rng.random() < 0.9]
        chunks = [(req_id, self.rng.randint(1, count)) for req_id, count in left.items() if count > 1]
        slots = {
            req_id: [self._slot() for _ in range(count)] for req_id, count in [*((i, 1) for i in decodes), *chunks]
        }
        self.slots = slots
        step = Step(
            [StepRow(req_id, int32s(slots[req_id])) for req_id, _ in chunks],
            decode_ids=int64s(decodes),
            decode_slots=int32s([slots[req_id][0] for req_id in decodes]),
        )
        return step, {req_id: len(own) for req_id, own in slots.items()}

    def _slot(self) -> int:
        self.next_slot += 1
        return self.next_slot

    def _check(
        self,
        columns: StepColumns,
        order: list[int],
        counts: dict[int, int],
        before: dict[int, tuple[int, int, list[int]]],
    ) -> None:
        """The input of the step is what the model says, request by request."""
        start = 0
        for place, req_id in enumerate(order):
            ready, known, tokens = before[req_id]
            end = ready + counts[req_id]
            own = slice(start, start + counts[req_id])
            ids = [tokens[i] if i < known else LAST_SAMPLED for i in range(ready, end)]
            assert columns.tokens["token_id"][own].tolist() == ids
            assert columns.tokens["slot"][own].tolist() == self.slots[req_id]
            assert columns.tokens["position"][own].tolist() == list(range(ready, end))
            assert columns.reqs["start"][place] == start
            assert (columns.reqs["ready_len"][place], columns.reqs["seq_len"][place]) == (ready, end)
            assert columns.reqs["seed"][place] == 2**62 + req_id
            assert columns.reqs["temperature"][place] == self.reqs[req_id].sampling.temperature
            self.reqs[req_id].slots += self.slots[req_id]
            start = own.stop


def test_steps_have_the_tokens_slots_and_lengths_of_their_requests() -> None:
    for seed in range(4):
        worker = Worker(seed)
        for _ in range(4 * BLOCK):
            worker.launch()
            while len(worker.in_flight) > worker.rng.randrange(3):
                worker.collect()
            for req_id, req in worker.reqs.items():
                own = worker.batch._reqs[req_id]
                assert (own.cache_len, own.total_len, own.known_len) == (len(req.slots), len(req.tokens), req.known)
                if worker.rng.random() < 0.01:  # it empties the tail of the row
                    assert own.token_ids.tolist() == req.tokens[: req.known]


def test_a_token_of_a_request_that_left_does_not_reach_the_next_in_its_row() -> None:
    batch, collector = InferBatch(ReqManager(1, 40, CPU), 99, CPU), StepCollector()
    batch.add(NewReq(1, int32s([5, 6]), SamplingParams(), seed=0))
    packed = batch.pack(Step([StepRow(1, [0, 1])]), lambda shape: shape)
    collect = collector.add(PendingStep(torch.tensor([77]), batch.take_sampled(packed), None))
    batch.remove(1)
    batch.add(NewReq(2, int32s([8, 9]), SamplingParams(), seed=0))

    result = collect()
    batch.apply(collector.take_updates())

    assert (result.plain.req_ids.tolist(), result.plain.token_ids.tolist()) == ([1], [77])
    assert batch._reqs[2].token_ids.tolist() == [8, 9]
    assert not batch._reqs[2].has_token_in_flight
    assert np.array_equal(batch.columns.entry, [2])
