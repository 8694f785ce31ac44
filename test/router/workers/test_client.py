"""Steps over a real unix socket and rpyc, with workers that answer without a model."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rpyc.core import Channel, SocketStream, consts
from rpyc.utils.factory import connect_channel

from lightserve.config import HttpConfig, LaunchConfig, RouterConfig, ServerConfig, WorkerConfig
from lightserve.errors import WorkerDiedError
from lightserve.ipc.codec import encode
from lightserve.ipc.process import ChildConfig
from lightserve.ipc.worker_calls import RUN
from lightserve.messages.int_arrays import int32s
from lightserve.messages.params import GrammarSpec, SamplingParams
from lightserve.messages.step import NewReq, Step, StepResult, StepRow, Token, TokenColumns, TokenOut
from lightserve.router.workers.client import RpycModelClient
from lightserve.worker.rpc import RPYC_CONFIG, Launch, RouterConnection, StepConnection, StepServer
from test.waiting import DEADLINE_S, until


def echo(step: Step) -> StepResult:
    outs = [TokenOut(row.req_id, Token(int(row.slots[0]), logprob=-0.5, top_logprobs=[(1, -1.0)])) for row in step.rows]
    return StepResult(outs)


def in_order(run: Callable[[Step], StepResult]) -> Launch:
    """A worker that computes a step when its tokens are asked for."""
    return lambda step: partial(run, step)


def served(tmp_path: Path, *runs: Callable[[Step], StepResult]) -> list[str]:
    """Start a thread per rank, and return the paths of their sockets."""
    paths = []
    for rank, run in enumerate(runs):
        path = str(tmp_path / f"worker-{rank}")
        server = StepServer(path)
        threading.Thread(target=server.serve, args=(in_order(run),), daemon=True).start()
        paths.append(path)
    return paths


async def client_of(paths: list[str], restart_requests: list[tuple[str, bool]] | None = None) -> RpycModelClient:
    requests = [] if restart_requests is None else restart_requests
    return await RpycModelClient.connect(paths, lambda reason, caused: requests.append((reason, caused)))


def within_deadline(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await work

    asyncio.run(limited())


def test_a_step_and_its_tokens_cross_whole(tmp_path: Path) -> None:
    new = NewReq(
        1 << 50,
        int32s([1, 2, 3]),
        SamplingParams(temperature=0.5, grammar=GrammarSpec("regex", "é\0"), logit_bias={7: 1.5}),
        2**63 - 1,
        (4,),
    )
    seen: list[Step] = []

    def run(step: Step) -> StepResult:
        seen.append(step)
        return echo(step)

    async def scenario() -> None:
        client = await client_of(served(tmp_path, run))
        step = Step([StepRow(1 << 50, int32s([9, 8]))], [new], [3])

        outs = await client.run(step)

        assert [encode(one) for one in seen] == [encode(step)]
        assert outs.tokens == [TokenOut(1 << 50, Token(9, logprob=-0.5, top_logprobs=[(1, -1.0)]))]
        client.close()

    within_deadline(scenario())


def test_the_tokens_of_all_attention_groups_come_together_in_their_order(tmp_path: Path) -> None:
    may_end = threading.Event()

    def run_group(group: int, step: Step) -> StepResult:
        if group == 0:
            may_end.wait(DEADLINE_S)  # the other group is back before
        own = step.groups[group]
        slots = [int(row.slots[0]) for row in own.rows]
        return StepResult(echo(own).detailed, plain=TokenColumns.of([(7 + group, slots)]))

    async def scenario() -> None:
        paths = served(tmp_path, partial(run_group, 0), partial(run_group, 0), partial(run_group, 1))
        client = await RpycModelClient.connect(paths, lambda reason, caused: None, answering_ranks=[0, 2])
        step = Step([], groups=[Step([StepRow(1, [5])]), Step([StepRow(2, [6])])])

        future = client.run(step)
        is_pending = not future.done()
        may_end.set()
        outs = await future

        assert is_pending
        assert [(out.req_id, out.token.id) for out in outs.tokens] == [(7, 5), (8, 6), (1, 5), (2, 6)]
        client.close()

    within_deadline(scenario())


def test_several_steps_are_in_flight_and_run_in_order(tmp_path: Path) -> None:
    may_run = threading.Event()
    order: list[int] = []

    def run(step: Step) -> StepResult:
        may_run.wait(DEADLINE_S)
        order.append(int(step.rows[0].slots[0]))
        return echo(step)

    async def scenario() -> None:
        client = await client_of(served(tmp_path, run))

        futures = [client.run(Step([StepRow(1, [i])])) for i in range(5)]
        is_pending = [not future.done() for future in futures]
        may_run.set()
        outs = await asyncio.gather(*futures)

        assert is_pending == [True] * 5
        assert order == [out.tokens[0].token.id for out in outs] == [0, 1, 2, 3, 4]
        client.close()

    within_deadline(scenario())


def test_the_next_step_is_launched_while_the_first_waits_for_its_tokens(tmp_path: Path) -> None:
    launched: list[int] = []
    may_end = [threading.Event() for _ in range(4)]

    def launch(step: Step) -> Callable[[], StepResult]:
        number = step.rows[0].slots[0]
        launched.append(number)

        def collect() -> StepResult:
            assert may_end[number].wait(DEADLINE_S)
            return echo(step)

        return collect

    async def scenario() -> None:
        server = StepServer(str(tmp_path / "worker"))
        thread = threading.Thread(target=server.serve, args=(launch, 2), daemon=True)
        thread.start()
        client = await client_of([str(tmp_path / "worker")])

        futures = [client.run(Step([StepRow(1, [i])])) for i in range(4)]
        await until(lambda: launched == [0, 1])
        may_end[1].set()  # its answer passes the first one's
        assert (await futures[1]).tokens[0].token.id == 1
        assert not futures[0].done()
        await until(lambda: launched == [0, 1, 2])
        for event in may_end:
            event.set()
        outs = await asyncio.gather(*futures)

        assert [out.tokens[0].token.id for out in outs] == launched == [0, 1, 2, 3]
        client.close()
        await asyncio.to_thread(thread.join, DEADLINE_S)
        assert not thread.is_alive()

    within_deadline(scenario())


def large_step(number: int) -> Step:
    """With a prompt that no socket holds at once."""
    return Step([StepRow(1, [number])], [NewReq(number, [70_000 + number] * 300_000, SamplingParams(), 0)])


def test_a_step_that_no_socket_holds_is_sent_while_the_worker_launches_another(tmp_path: Path) -> None:
    """The worker does not read meanwhile. The router continues, and does not count the worker as lost."""
    may_launch = threading.Event()
    seen: list[Step] = []

    def launch(step: Step) -> Callable[[], StepResult]:
        assert may_launch.wait(DEADLINE_S)
        seen.append(step)
        return partial(echo, step)

    async def scenario() -> None:
        server = StepServer(str(tmp_path / "worker"))
        threading.Thread(target=server.serve, args=(launch, 2), daemon=True).start()
        client = await client_of([str(tmp_path / "worker")])
        steps = [Step([StepRow(1, [0])])]
        steps += [large_step(1), large_step(2)]

        futures = [client.run(step) for step in steps]
        is_lost = client.is_lost
        may_launch.set()
        outs = await asyncio.gather(*futures)

        assert not is_lost
        assert [encode(step) for step in seen] == [encode(RUN.decode_request(encode(step))) for step in steps]
        assert [out.tokens[0].token.id for out in outs] == [0, 1, 2]
        client.close()

    within_deadline(scenario())


def test_a_worker_that_disconnects_in_the_middle_of_a_large_step_is_lost(tmp_path: Path) -> None:
    async def scenario() -> None:
        worker = HangsUp(str(tmp_path / "worker"))
        client = await client_of([worker.path])
        worker.may_launch.clear()
        futures = [client.run(large_step(0))]
        futures.append(client.run(Step([StepRow(1, [1])])))

        worker.hang_up()

        await until(lambda: client.is_lost)
        for future in futures:
            with pytest.raises(WorkerDiedError):
                await future
        client.close()

    within_deadline(scenario())


def test_a_worker_can_be_replaced_in_the_middle_of_a_large_step(tmp_path: Path) -> None:
    async def scenario() -> None:
        worker = HangsUp(str(tmp_path / "worker"))
        client = await client_of([worker.path])
        worker.may_launch.clear()
        futures = [client.run(Step([StepRow(1, [0])]))]
        futures.append(client.run(large_step(1)))

        client.request_restart("it does not end", caused_by_request=False)

        for future in futures:
            with pytest.raises(WorkerDiedError, match="it does not end"):
                await future
        worker.hang_up()

    within_deadline(scenario())


def test_every_rank_runs_every_step_and_rank_0_returns_the_tokens(tmp_path: Path) -> None:
    ran: list[tuple[int, int]] = []

    def rank(number: int) -> Callable[[Step], StepResult]:
        def run(step: Step) -> StepResult:
            ran.append((number, step.rows[0].slots[0]))
            return StepResult([TokenOut(1, Token(number))])

        return run

    async def scenario() -> None:
        client = await client_of(served(tmp_path, rank(0), rank(1)))

        outs = [await client.run(Step([StepRow(1, [i])])) for i in range(2)]

        assert [out.tokens for out in outs] == [[TokenOut(1, Token(0))]] * 2
        await until(lambda: len(ran) == 4)
        assert sorted(ran) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        client.close()

    within_deadline(scenario())


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_failing_worker_reports_to_its_own_process_and_fails_the_steps_in_flight(
    tmp_path: Path, bad_rank: int
) -> None:
    may_end = threading.Event()
    failures: list[BaseException] = []

    def good(step: Step) -> StepResult:
        may_end.wait(DEADLINE_S)
        return echo(step)

    def bad(step: Step) -> StepResult:
        raise SystemExit("out of memory")

    def serve_bad(server: StepServer) -> None:
        try:
            server.serve(in_order(bad))
        except SystemExit as error:
            failures.append(error)

    async def scenario() -> None:
        paths = [str(tmp_path / "worker-0"), str(tmp_path / "worker-1")]
        servers = [StepServer(path) for path in paths]
        thread = threading.Thread(target=serve_bad, args=(servers[bad_rank],))
        thread.start()
        threading.Thread(target=servers[1 - bad_rank].serve, args=(in_order(good),), daemon=True).start()
        client = await client_of(paths)

        with pytest.raises(WorkerDiedError, match=f"model worker {bad_rank} closed its connection"):
            await client.run(Step([StepRow(1, [0])]))
        assert client.is_lost
        thread.join(DEADLINE_S)

        assert [str(error) for error in failures] == ["out of memory"]
        may_end.set()
        client.close()

    within_deadline(scenario())


class RecordingServer(StepServer):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.sockets: list[socket.socket] = []  # the first one is for steps

    def _serve_connection(self, sock: socket.socket, service: RouterConnection) -> None:
        self.sockets.append(sock)
        super()._serve_connection(sock, service)


class HangsUp(RecordingServer):
    """A worker whose connection for steps can be closed under it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path
        self.may_launch = threading.Event()
        self.may_launch.set()
        self._thread = threading.Thread(target=self.serve, args=(self._launch,))
        self._thread.start()

    def _launch(self, step: Step) -> Callable[[], StepResult]:
        self.may_launch.wait(DEADLINE_S)
        return partial(echo, step)

    def hang_up(self) -> None:
        self.sockets[0].shutdown(socket.SHUT_RDWR)
        self.may_launch.set()
        self._thread.join(DEADLINE_S)


def test_a_worker_that_disconnects_while_idle_is_noticed(tmp_path: Path) -> None:
    async def scenario() -> None:
        worker = HangsUp(str(tmp_path / "worker"))
        client = await client_of([worker.path])
        await client.run(Step([StepRow(1, [0])]))
        assert not client.is_lost

        worker.hang_up()

        await until(lambda: client.is_lost)
        with pytest.raises(WorkerDiedError):
            await client.run(Step([StepRow(1, [1])]))
        client.close()

    within_deadline(scenario())


def test_a_worker_that_disconnected_before_a_step_is_sent_is_lost(tmp_path: Path) -> None:
    """The event loop has not seen it yet: rpyc finds out as it sends, and closes the socket."""

    async def scenario() -> None:
        worker = HangsUp(str(tmp_path / "worker"))
        restart_requests: list[tuple[str, bool]] = []
        client = await client_of([worker.path], restart_requests)
        await client.run(Step([StepRow(1, [0])]))

        worker.hang_up()
        future = client.run(Step([StepRow(1, [1])]))
        assert client.is_lost
        client.request_restart("the connection was closed", caused_by_request=False)

        with pytest.raises(WorkerDiedError, match="model worker 0 closed its connection"):
            await future
        assert restart_requests == [("the connection was closed", False)]

    within_deadline(scenario())


def test_a_worker_ends_quietly_if_the_connection_is_closed_while_it_sends() -> None:
    class LateChannel(Channel):  # type: ignore[misc]  # rpyc is untyped
        def send(self, data: bytes) -> None:
            connection._cleanup()  # as in another thread that finds the router gone, just before this one sends

    ours, theirs = socket.socketpair()
    steps = StepConnection(in_order(echo))
    service = RouterConnection({}, set())
    connection = service._connect(LateChannel(SocketStream(theirs), compress=False), RPYC_CONFIG)
    router = connect_channel(Channel(SocketStream(ours), compress=False))
    router.async_request(consts.HANDLE_PING, b"")

    steps.serve(connection)

    assert connection.closed


def test_a_restart_request_fails_the_steps_in_flight_and_does_not_wait(tmp_path: Path) -> None:
    may_end = threading.Event()

    def hang(step: Step) -> StepResult:
        may_end.wait(DEADLINE_S)
        return echo(step)

    async def scenario() -> None:
        restart_requests: list[tuple[str, bool]] = []
        client = await client_of(served(tmp_path, hang), restart_requests)
        futures = [client.run(Step([StepRow(1, [i])])) for i in range(2)]

        client.request_restart("a step has been running for 61 s", caused_by_request=True)

        for future in futures:
            with pytest.raises(WorkerDiedError, match="61 s"):
                await future
        assert client.is_lost
        assert restart_requests == [("a step has been running for 61 s", True)]
        may_end.set()

    within_deadline(scenario())


def test_a_late_connection_to_dead_workers_does_not_reach_their_successors(tmp_path: Path) -> None:
    """Those are loading, and listen already: to wait for their answer would stop the router."""
    config = ServerConfig(worker=WorkerConfig(), router=RouterConfig(), http=HttpConfig(), launch=LaunchConfig())
    child_config = ChildConfig(config, str(tmp_path))

    async def scenario() -> None:
        loading = StepServer(child_config.worker_path(0, 2))

        with pytest.raises(FileNotFoundError):
            await client_of([child_config.worker_path(0, 1)])

        del loading  # it listened until here

    within_deadline(scenario())


@pytest.mark.parametrize("begins_to_answer", [False, True])
def test_a_worker_that_accepts_and_does_not_answer_is_given_up_and_blocks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins_to_answer: bool
) -> None:
    monkeypatch.setattr("lightserve.router.workers.connection.CONNECT_S", 0.3)
    (serving,) = served(tmp_path, echo)
    with socket.socket(socket.AF_UNIX) as hanging:
        hanging.bind(str(tmp_path / "hanging"))
        hanging.listen()

        async def scenario() -> None:
            connecting = asyncio.create_task(client_of([serving, str(tmp_path / "hanging")]))
            if begins_to_answer:
                accepted.append((await asyncio.to_thread(hanging.accept))[0])
                accepted[0].sendall(b"\0")  # of a header
            turns = 0
            while not connecting.done():
                await asyncio.sleep(0.001)
                turns += 1

            with pytest.raises(TimeoutError, match="model worker 1 did not answer within"):
                await connecting
            assert turns > 3, "the event loop ran meanwhile"
            await until(lambda: not any(thread.name.startswith("connect") for thread in threading.enumerate()))

        accepted: list[socket.socket] = []
        within_deadline(scenario())
        for sock in accepted:
            sock.close()


def test_a_second_router_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        paths = served(tmp_path, echo)
        client = await client_of(paths)

        with pytest.raises(ConnectionRefusedError, match=r"model worker 0 .* the call 'run' has a connection already"):
            await client_of(paths)

        assert (await client.run(Step([StepRow(1, [7])]))).tokens[0].token.id == 7
        client.close()

    within_deadline(scenario())


def test_no_connection_is_left_if_one_of_the_workers_cannot_be_reached(tmp_path: Path) -> None:
    server = RecordingServer(str(tmp_path / "worker-0"))

    async def scenario() -> None:
        with pytest.raises(FileNotFoundError):
            await client_of([str(tmp_path / "worker-0"), str(tmp_path / "nobody")])
        await until(lambda: bool(server.sockets) and all(sock.fileno() == -1 for sock in server.sockets))

    threading.Thread(target=server.serve, args=(in_order(echo),), daemon=True).start()
    within_deadline(scenario())
