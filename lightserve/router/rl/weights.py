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
        self._last_tensors: dict[str, list[WeightTensor]] = {}  # of the groups: an update may repeat them
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
            self._last_tensors.pop(message.name, None)
            self._check(await self._call(command, message.timeout_s))
            self._buffers[message.name] = message.buffering, message.buffer_bytes
        return self._reply()

    async def _leave(self, message: LeaveWeightGroup) -> RlReply:
        async with self._lock:
            self._last_tensors.pop(message.name, None)
            self._check(await self._call(LeaveGroup(message.name)))
        return self._reply()

    # updates in parts

    async def _begin(self, message: BeginWeightUpdate) -> RlReply:
        async with self._lock:
            if self._is_open:
                await self._call(CancelLoad())
                self._fail("the trainer began another weight update before this one had ended")
            self._is_explicit = True
        return self._reply()

    async def _receive(self, message: ReceiveWeights) -> RlReply:
        async with self._lock:
            tensors = message.tensors or self._last_tensors.get(message.group)
            if not tensors:
                raise InvalidRequestError("names: the first update of a group names its tensors")
            checked = self._check(await self._call(CheckTensors(message.group, tensors)))
            self._last_tensors[message.group] = tensors
            restarts = checked.has_repeated or not self._is_open
            buffering, buffer_bytes = self._buffers.get(message.group, (WeightBuffering.EACH, 0))
            command = ReceiveTensors(message.group, tensors, message.buffering or buffering, buffer_bytes, restarts)
            if not checked.used and not self._is_open:  # the model computes these itself
                self._check(await self._call(msgspec.structs.replace(command, discards=True), UPDATE_TIMEOUT_S))
                return self._reply()
            await self._open(message.aborts)
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
                self._is_explicit = False
                self._set(message.version)
                return self._reply()
            self._version, self._recomputes = message.version or self._version, message.recomputes
            await self._finish()
        return self._reply()

    async def _finish(self) -> None:
        """All weights have come, or all of the layer for drafts: then those of the model stay, valid or not."""
        finished = await self._write(FinishLoad())
        if not finished.has_only_drafts:
            self._complete(TRAINER)
            return
        self._set(self._version)
        self._forget_open()
        self._is_explicit = False
        self._steps.release(_HOLD)
        logger.info("the layer for drafts has new weights")

    async def _resume(self, message: ResumeGeneration) -> RlReply:
        """Generation shall go on. An update that is not complete has failed."""
        async with self._lock:
            if self._is_open:
                await self._call(CancelLoad())
                self._fail("generation was resumed before all weights of the update had come; send all weights again")
        return await self._resume_paused(message)

    # from a folder

    async def _load(self, message: LoadWeightsFrom) -> RlReply:
        folder = str(await asyncio.to_thread(weights_folder, self._root, message.path))
        async with self._lock:
            self._check(await self._call(CheckFolder(folder), UPDATE_TIMEOUT_S))
            self._is_explicit = False
            await self._open(message.aborts)
            self._version, self._recomputes = message.version, message.recomputes
            await self._write(LoadFolder(folder))
            self._complete(folder)
        return self._reply()

    async def restore(self, workers: WorkerCaller) -> None:
        """New workers have the weights of --model_dir. They get those that were served, if these can be loaded again.

        Otherwise nothing is generated until the trainer has sent them again.
        """
        served = self.served
        async with self._lock:
            if self._is_open:
                self._fail("weights_lost: the model workers died during a weight update; send all weights again")
            elif served.problem or served.source == TRAINER:
                self._fail(served.problem or LOST)
            elif served.source:
                await self._load_again(workers, served)

    async def _load_again(self, workers: WorkerCaller, served: ServedWeights) -> None:
        reply = await workers.call(UPDATE_WEIGHTS, LoadFolder(served.source), UPDATE_TIMEOUT_S)
        if reply is None or reply.error:
            reason = "they died again" if reply is None else reply.error
            self._fail(f"weights_lost: new model workers cannot load {served.source} ({reason}); update them again")
            return
        logger.info("the new workers have loaded the weights of %s again", served.source)

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
            self._fail(f"the weight update has failed: {reply.error}; send all weights again")
        self._check(reply)
        self._watch()
        return reply

    async def _open(self, aborts: bool) -> None:
        if aborts:
            self._end_requests()
        self._steps.hold(_HOLD)
        await self._steps.wait_unwritten()  # what comes later would belong to the new weights
        if not self._is_open:
            logger.info("a weight update has begun: %d requests wait", self._scheduler.num_running)
        self._is_open = True

    def _watch(self) -> None:
        """A trainer that is gone must not leave requests waiting for the rest of its weights."""
        if self._stalled is not None:
            self._stalled.cancel()
        self._stalled = asyncio.get_running_loop().call_later(STALLED_S, self._on_stalled)

    def _on_stalled(self) -> None:
        if self._is_open and not self._lock.locked():
            self._fail(f"no weights of the open update have come for {STALLED_S:g} s; send all weights again")

    def _complete(self, source: str) -> None:
        version, recomputes = self._version, self._recomputes
        self._forget_open()
        self._is_explicit = False
        self.served.replaced(source, version)
        self.on_replaced()
        if recomputes:
            self._scheduler.clear_cache()
        for group in self._scheduler.groups:
            for req in group.queue:
                self.served.rename(req)
        self._report_version()
        self._output_processor.problem = ""
        self._steps.release(_HOLD)
        logger.info(
            "weights of version %r, generation %d, from %s", self.served.version, self.served.generation, source
        )

    def _set(self, version: str | None) -> None:
        if version is not None and version != self.served.version:
            self.served.version = version
            self._report_version()

    def _report_version(self) -> None:
        """Which tokens of the open requests were generated with the weights before."""
        reqs = [req for group in self._scheduler.groups for req in (*group.queue, *group.batch)]
        self._output_processor.weight_version = self.served.version
        self._send(WeightsReplaced(self.served.version, [VersionedReq(req.req_id, req.output_len) for req in reqs]))

    def _fail(self, problem: str) -> None:
        """Nothing can be generated: the requests end, and new ones are refused."""
        logger.error("no text can be generated: %s", problem)
        self._forget_open()
        self.served.problem = self._output_processor.problem = problem
        failed = self._scheduler.drop(lambda req: True)
        if failed:
            self._output_processor.fail(failed, 503, lambda _: problem)
        self._output_processor.send_heartbeat(0.0, self._steps.has_workers)
        self._steps.release(_HOLD)  # there are no requests

    def _forget_open(self) -> None:
        self._is_open = False
        self._version = None
        if self._stalled is not None:
            self._stalled.cancel()

    def _end_requests(self) -> None:
        self._output_processor.end(self._scheduler.drop(lambda req: not req.is_internal))
        self._steps.wake()

    def _reply(self, missing: int | None = None, values: list[float] | None = None) -> RlReply:
        state = msgspec.structs.replace(self.served.state(), missing=missing, values=values or [])
        return RlReply(0, weights=state)
