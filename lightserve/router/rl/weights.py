"""Weight updates of an engine: no step runs during an update, and no text is generated with half of the weights.

    check on all ranks ─▶ hold steps ─▶ receive or load ─▶ all have come ─▶ next generation of the weights ─▶ release

What does not fit is refused by the check, and changes nothing. After the first byte has changed, a failure leaves a
``problem``: requests end with it, until an update succeeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from lightserve.errors import ConflictError, InvalidRequestError, ServerError
from lightserve.ipc.worker_calls import UPDATE_WEIGHTS, WorkerCaller
from lightserve.messages.output import ToDetokenization, VersionedReq, WeightsReplaced
from lightserve.messages.rl import (
    TRAINER,
    BeginWeightUpdate,
    EndWeightUpdate,
    GetWeights,
    JoinWeightGroup,
    LeaveWeightGroup,
    LoadWeightsFrom,
    ReceiveWeights,
    ResumeGeneration,
    RlReply,
    SetWeightVersion,
)
from lightserve.messages.weights import (
    CancelLoad,
    CheckFolder,
    CheckTensors,
    FinishLoad,
    JoinNccl,
    JoinTorchGroup,
    LeaveGroup,
    LoadFolder,
    ReadTensor,
    ReceiveTensors,
    WeightBuffering,
    WeightSelector,
    WeightTensor,
    WorkerWeightsCommand,
    WorkerWeightsReply,
)
from lightserve.router.output_processor import OutputProcessor
from lightserve.router.rl.control import RlControl
from lightserve.router.rl.served_weights import ServedWeights
from lightserve.router.rl.weights_folder import weights_folder
from lightserve.router.scheduler import Scheduler
from lightserve.router.step_loop import StepLoop
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

UPDATE_TIMEOUT_S = 1800.0  # of one call: terabytes from a disk
CALL_MARGIN_S = 15.0  # the workers report their own timeouts within this time
STALLED_S = 600.0  # between the parts of an update
_HOLD = "weights"

NO_WORKERS = "there are no model workers now: they died, or the server sleeps"
LOST = (
    "weights_lost: the model workers died after the last weight update, whose weights came from a trainer; "
    "send all weights again"
)
DRAFTS_LOST = (
    "the model workers died after the last update of the weights of drafts, which came from a trainer: they draft with "
    "those of the server's start until the trainer sends them again"
)


class WeightsControl:
    """One update at a time, whatever API began it."""

    def __init__(
        self,
        scheduler: Scheduler,
        steps: StepLoop,
        output_processor: OutputProcessor,
        send: Callable[[ToDetokenization], None],
    ) -> None:
        self.served = ServedWeights()
        self.on_replaced: Callable[[], None] = lambda: None  # called before cached prefixes are dropped
        self._scheduler = scheduler
        self._steps = steps
        self._output_processor = output_processor
        self._send = send
        self._lock = asyncio.Lock()
        self._root: str | None = None
        self._num_ranks = 1
        self._is_open = False  # some weights are new and others are not
        self._is_explicit = False  # the trainer said that it begins, and will say that it ends
        self._selector = WeightSelector.ALL  # of calls of the open update that name none
        self._writes_model = False  # in the open update
        # of the groups: an update may repeat them
        self._last_tensors: dict[tuple[str, WeightSelector], list[WeightTensor]] = {}
        self._buffers: dict[str, tuple[WeightBuffering, int]] = {}  # of the groups
        self._recomputes = True
        self._version: str | None = None  # of the open update
        self._resume_paused: Callable[[ResumeGeneration], Awaitable[RlReply]]
        self._stalled: asyncio.TimerHandle | None = None

    def enable(self, control: RlControl, weights_dir: str | None, num_ranks: int) -> None:
        """``num_ranks``: of this engine, and of every other one that a trainer has."""
        self._root, self._num_ranks = weights_dir, num_ranks
        control.handle(JoinWeightGroup, self._join)
        control.handle(LeaveWeightGroup, self._leave)
        control.handle(BeginWeightUpdate, self._begin)
        control.handle(ReceiveWeights, self._receive)
        control.handle(EndWeightUpdate, self._end)
        control.handle(LoadWeightsFrom, self._load)
        control.handle(SetWeightVersion, self._set_version)
        control.handle(GetWeights, self._get)
        self._resume_paused = control.pause.resume
        control.handle(ResumeGeneration, self._resume)

    # groups

    async def _join(self, message: JoinWeightGroup) -> RlReply:
        first = message.first_rank + message.engine * self._num_ranks
        command: WorkerWeightsCommand
        if message.uses_torch:
            command = JoinTorchGroup(
                message.name, message.address, message.port, first, message.world_size, message.backend,
                message.timeout_s,
            )  # fmt: skip
        else:
            command = JoinNccl(
                message.name, first, message.world_size, message.timeout_s, message.unique_id, message.address,
                message.port,
            )  # fmt: skip
        async with self._lock:
            self._forget_tensors(message.name)
            self._check(await self._call(command, message.timeout_s))
            self._buffers[message.name] = message.buffering, message.buffer_bytes
        return self._reply()

    async def _leave(self, message: LeaveWeightGroup) -> RlReply:
        async with self._lock:
            self._forget_tensors(message.name)
            self._check(await self._call(LeaveGroup(message.name)))
        return self._reply()

    def _forget_tensors(self, group: str) -> None:
        for selector in WeightSelector:
            self._last_tensors.pop((group, selector), None)

    # updates in parts

    async def _begin(self, message: BeginWeightUpdate) -> RlReply:
        async with self._lock:
            if self._is_open:
                await self._call(CancelLoad())
                self._fail("the trainer began another weight update before this one had ended")
            self._is_explicit, self._selector = True, message.selector
        return self._reply()

    async def _receive(self, message: ReceiveWeights) -> RlReply:
        async with self._lock:
            selector = message.selector or self._selector
            tensors = message.tensors or self._last_tensors.get((message.group, selector))
            if not tensors:
                raise InvalidRequestError("names: the first update of a group names its tensors")
            checked = self._check(await self._call(CheckTensors(message.group, tensors, selector)))
            self._last_tensors[message.group, selector] = tensors
            restarts = checked.has_repeated or not self._is_open
            buffering, buffer_bytes = self._buffers.get(message.group, (WeightBuffering.EACH, 0))
            command = ReceiveTensors(
                message.group, tensors, message.buffering or buffering, buffer_bytes, restarts, selector=selector
            )
            if not checked.used and not self._is_open:  # the model computes these itself
                self._check(await self._call(msgspec.structs.replace(command, discards=True), UPDATE_TIMEOUT_S))
                return self._reply()
            await self._open(message.aborts, selector)
            self._version, self._recomputes = message.version or self._version, message.recomputes
            reply = await self._write(command)
            missing = reply.missing
            if missing == 0 and not self._is_explicit:
                await self._finish()
                missing = None
        return self._reply(missing)

    async def _end(self, message: EndWeightUpdate) -> RlReply:
        async with self._lock:
            if not self._is_open:
                if self.served.problem and self._is_explicit:
                    raise ConflictError(f"the weight update has failed: {self.served.problem}")
                self._end_session()
                self._set(message.version)
                return self._reply()
            self._version, self._recomputes = message.version or self._version, message.recomputes
            await self._finish()
        return self._reply()

    async def _finish(self) -> None:
        """All weights have come, or all of what drafts: then those of the model stay, valid or not."""
        self._complete(TRAINER, await self._write(FinishLoad()))

    async def _resume(self, message: ResumeGeneration) -> RlReply:
        """Generation shall go on. An update that is not complete has failed."""
        async with self._lock:
            if self._is_open:
                await self._call(CancelLoad())
                self._fail("generation was resumed before all weights of the update had come")
        return await self._resume_paused(message)

    # from a folder

    async def _load(self, message: LoadWeightsFrom) -> RlReply:
        folder = str(await asyncio.to_thread(weights_folder, self._root, message.path))
        async with self._lock:
            self._check(await self._call(CheckFolder(folder, message.selector), UPDATE_TIMEOUT_S))
            self._end_session()
            await self._open(message.aborts, message.selector)
            self._version, self._recomputes = message.version, message.recomputes
            self._complete(folder, await self._write(LoadFolder(folder, message.selector)))
        return self._reply()

    async def restore(self, workers: WorkerCaller) -> None:
        """New workers have the weights of --model_dir. They get those that were served, if these can be loaded again.

        Otherwise nothing is generated until the trainer has sent them again.
        """
        served = self.served
        async with self._lock:
            has_half_drafts = bool(served.half_drafts) or self._is_open
            if self._is_open and self._writes_model:
                self._fail("weights_lost: the model workers died during a weight update")
            elif served.model_problem or served.source == TRAINER:
                self._refuse(served.model_problem or LOST)
            elif served.source:
                await self._load_again(workers, served)
            await self._restore_drafts(workers, has_half_drafts)

    async def _load_again(self, workers: WorkerCaller, served: ServedWeights) -> None:
        error = await self._error_of_load(workers, LoadFolder(served.source))
        if error:
            self._refuse(f"weights_lost: new model workers cannot load {served.source} ({error}); update them again")
            return
        logger.info("the new workers have loaded the weights of %s again", served.source)

    async def _restore_drafts(self, workers: WorkerCaller, has_half_drafts: bool) -> None:
        """New workers draft with the weights of their files. They may, since no text depends on it, but say so."""
        served = self.served
        if self._is_open:  # with weights of drafts alone
            self._forget_open()
            self._steps.release(_HOLD)
        problem = DRAFTS_LOST if has_half_drafts or served.draft_source == TRAINER else ""
        if not problem and served.draft_source not in ("", served.source):
            error = await self._error_of_load(workers, LoadFolder(served.draft_source, WeightSelector.DRAFT))
            problem = error and f"new model workers cannot load {served.draft_source} for drafts ({error})"
        if problem:
            served.drafts_lost(problem)
            self._report_problems()
            logger.warning("drafts have older weights: %s", problem)

    @staticmethod
    async def _error_of_load(workers: WorkerCaller, command: LoadFolder) -> str:
        reply = await workers.call(UPDATE_WEIGHTS, command, UPDATE_TIMEOUT_S)
        return "they died again" if reply is None else reply.error

    # names

    async def _set_version(self, message: SetWeightVersion) -> RlReply:
        async with self._lock:
            if message.aborts:
                self._end_requests()
            self._set(message.version)
        return self._reply()

    async def _get(self, message: GetWeights) -> RlReply:
        if not message.name:
            return self._reply()
        async with self._lock:
            checked = self._check(await self._call(ReadTensor(message.name, message.limit)))
        return self._reply(values=checked.values)

    # parts of all these

    async def _call(self, command: WorkerWeightsCommand, timeout_s: float = 60.0) -> WorkerWeightsReply:
        """A worker that does not reply hangs in a collective of a trainer that is gone: all are replaced."""
        try:
            async with asyncio.timeout(timeout_s + CALL_MARGIN_S):
                reply = await self._steps.call_workers(UPDATE_WEIGHTS, command)
        except TimeoutError:
            reason = f"a weight update did not end within {timeout_s + CALL_MARGIN_S:g} s"
            self._steps.restart_workers(reason)
            return WorkerWeightsReply(reason)
        return WorkerWeightsReply(NO_WORKERS) if reply is None else reply

    @staticmethod
    def _check(reply: WorkerWeightsReply) -> WorkerWeightsReply:
        if reply.error:
            raise InvalidRequestError(reply.error) if reply.is_client_error else ServerError(reply.error)
        return reply

    async def _write(self, command: WorkerWeightsCommand) -> WorkerWeightsReply:
        """Change weights. From now on, a failure leaves none that can be used."""
        reply = await self._call(command, UPDATE_TIMEOUT_S)
        if reply.error:
            if not isinstance(command, LoadFolder):
                await self._call(CancelLoad())
            self._fail(f"the weight update has failed: {reply.error}")
        self._check(reply)
        self._watch()
        return reply

    async def _open(self, aborts: bool, selector: WeightSelector) -> None:
        if aborts:
            self._end_requests()
        self._steps.hold(_HOLD)
        await self._steps.wait_unwritten()  # what comes later would belong to the new weights
        if not self._is_open:
            logger.info("a weight update has begun: %d requests wait", self._scheduler.num_running)
        self._is_open = True
        self._writes_model |= selector is not WeightSelector.DRAFT

    def _watch(self) -> None:
        """A trainer that is gone must not leave requests waiting for the rest of its weights."""
        if self._stalled is not None:
            self._stalled.cancel()
        self._stalled = asyncio.get_running_loop().call_later(STALLED_S, self._on_stalled)

    def _on_stalled(self) -> None:
        if self._is_open and not self._lock.locked():
            self._fail(f"no weights of the open update have come for {STALLED_S:g} s")

    def _complete(self, source: str, written: WorkerWeightsReply) -> None:
        version, recomputes, served = self._version, self._recomputes, self.served
        self._forget_open()
        self._end_session()
        if written.has_drafts:
            served.drafts_replaced(source)
        if written.has_model:
            served.replaced(source, version)
        if written.has_model or recomputes:
            self.on_replaced()
        if recomputes:
            self._scheduler.clear_cache()
        if written.has_model:
            self._rename_requests()
            self._report_version()
        else:
            self._set(version)
        self._report_problems()
        self._steps.release(_HOLD)
        parts = [name for name, has in (("model", written.has_model), ("drafts", written.has_drafts)) if has]
        logger.info(
            "new weights of the %s: version %r, generation %d, from %s",
            " and the ".join(parts), served.version, served.generation, source,
        )  # fmt: skip

    def _rename_requests(self) -> None:
        for group in self._scheduler.groups:
            for req in group.queue:
                self.served.rename(req)

    def _set(self, version: str | None) -> None:
        if version is not None and version != self.served.version:
            self.served.version = version
            self._report_version()

    def _report_version(self) -> None:
        """Which tokens of the open requests were generated with the weights before."""
        reqs = [req for group in self._scheduler.groups for req in (*group.queue, *group.batch)]
        self._output_processor.weight_version = self.served.version
        self._send(WeightsReplaced(self.served.version, [VersionedReq(req.req_id, req.output_len) for req in reqs]))

    def _fail(self, reason: str) -> None:
        """The open update has failed."""
        what = "weights" if self._writes_model else "weights of the draft head"
        self._refuse(f"{reason}; send all {what} again", self._writes_model)

    def _refuse(self, problem: str, of_model: bool = True) -> None:
        """Nothing can be generated: the requests end, and new ones are refused."""
        logger.error("no text can be generated: %s", problem)
        self._forget_open()
        if of_model:
            self.served.model_problem = problem
        else:
            self.served.half_drafts = problem
        self._report_problems()
        failed = self._scheduler.drop(lambda req: True)
        if failed:
            self._output_processor.fail(failed, 503, lambda _: problem)
        self._output_processor.send_heartbeat(0.0, self._steps.has_workers)
        self._steps.release(_HOLD)  # there are no requests

    def _report_problems(self) -> None:
        self._output_processor.problem = self.served.problem
        self._output_processor.metrics.values["draft_weights_old"] = float(bool(self.served.draft_problem))

    def _forget_open(self) -> None:
        self._is_open = self._writes_model = False
        self._version = None
        if self._stalled is not None:
            self._stalled.cancel()

    def _end_session(self) -> None:
        self._is_explicit, self._selector = False, WeightSelector.ALL

    def _end_requests(self) -> None:
        self._output_processor.end(self._scheduler.drop(lambda req: not req.is_internal))
        self._steps.wake()

    def _reply(self, missing: int | None = None, values: list[float] | None = None) -> RlReply:
        state = msgspec.structs.replace(self.served.state(), missing=missing, values=values or [])
        return RlReply(0, weights=state)
