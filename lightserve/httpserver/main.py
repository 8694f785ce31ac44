"""An HTTP process: uvicorn on a socket that the launcher opened."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import uvicorn

from lightserve.batches.store import BatchStore
from lightserve.config import HttpConfig, ServerConfig
from lightserve.httpserver.app import build_app, build_batch_app
from lightserve.httpserver.batches.executor import BatchExecutor
from lightserve.httpserver.batches.runner import LineRunner
from lightserve.httpserver.chat.output import output_formats
from lightserve.httpserver.chat.request import ChatBody
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.engine_client import HttpServerManager
from lightserve.httpserver.grammar.check import GrammarCheck
from lightserve.httpserver.http.protocol import LimitedProtocol, QuietProtocol
from lightserve.httpserver.openai.completions_request import CompletionBody
from lightserve.httpserver.resume.stream_log import StreamLog, report_stream_log
from lightserve.httpserver.rl.settings import settings_of
from lightserve.httpserver.tracing.exporter import CLOSE_S, SpanExporter, report_counts, start_exporter
from lightserve.ipc.channel import Receiver, Sender
from lightserve.ipc.process import ChildConfig, LauncherConnection, run_child
from lightserve.links.tls import server_context
from lightserve.messages.control import CertificateRenewed, Drain, Drained, EngineDied, EngineInfo, Keys, Ready
from lightserve.messages.output import ToHttpserver
from lightserve.messages.request import ToRouter
from lightserve.model_files.config.images import read_image_files
from lightserve.model_files.config.sampling_defaults import read_sampling_defaults
from lightserve.model_files.model_summary import read_details
from lightserve.model_files.pinned_prefixes import encode_pinned_prefixes
from lightserve.model_files.source import ModelSource, pooling_of, resolve
from lightserve.model_files.tokenizer.tokenizer import Tokenizer, load_tokenizer_or_none
from lightserve.utils.collector import collect_rarely
from lightserve.utils.logger import init_logger

if TYPE_CHECKING:
    from lightserve.media.reader import ImageReader

logger = init_logger(__name__)

KEEP_ALIVE_S = 75  # longer than the idle time of common client pools, so that the client closes first

# p99 of /health in ms, with 2,500 connections at once on two cores: 800 to 1,650 with 8 accepts per iteration of the
# event loop, 215 to 470 with 32, 165 to 280 with 64, 133 to 173 with 128. An iteration without a connection costs
# nothing, one with a connection some 50 us.
ACCEPTS_PER_ITERATION = 128
FIRST_BODIES = (ChatBody, CompletionBody)  # 9 and 7 ms for their validators
REPORT_S = 1.0  # between two messages about images


async def main(child_config: ChildConfig, launcher: LauncherConnection) -> None:
    config = child_config.config
    from_detokenization: Receiver[ToHttpserver] = Receiver(
        child_config.address(f"http-{child_config.index}"), ToHttpserver
    )
    to_router: Sender[ToRouter] = Sender(child_config.address("router"))
    has_engines = config.cluster.has_dispatcher
    manager = HttpServerManager(child_config.http_process, to_router, from_detokenization, has_engines)
    if config.cluster.is_gateway:
        flag = "--engines" if config.cluster.engines else "--engines_file"
        manager.no_workers_reason = f"no engine of {flag} can be reached; requests wait for one"
    source = resolve(config.worker.model_dir, needs_weights=False, trusts_code=config.worker.trust_remote_code)
    name = config.http.first_model_name(source.name)
    exporter = start_exporter(config.http.otlp_endpoint, name, child_config.index)
    tokenizer = load_tokenizer_or_none(source, config.http.chat_template)
    context = ServerContext(
        config.http,
        name,
        manager,
        tokenizer,
        read_sampling_defaults(source, config.http.generation_config),
        run_dir=child_config.run_dir,
        http_index=child_config.index,
        details=read_details(source),
        export_trace=None if exporter is None else exporter.put,
        pooling=pooling_of(
            source, config.worker.model_type, config.worker.task, config.worker.pooling, config.worker.score_template
        ),
        pinned_prefixes=encode_pinned_prefixes(config.router.pinned_prefixes, tokenizer),
        images=_image_reader(config, source, tokenizer),
        drafts_tokens=config.worker.speculation is not None or config.cluster.is_gateway,
        batches=None if config.http.batch_dir is None else BatchStore(config.http.batch_dir),
        rl=settings_of(config),
        grammars=GrammarCheck(child_config.path(f"grammar-{child_config.index}")),
        stream_log=None
        if config.http.stream_log is None
        else StreamLog(config.http.stream_log, config.http.stream_log_ttl),
    )
    context.warm_up()
    output_formats(context)  # an unknown --tool_call_parser or --reasoning_parser fails here
    tls = _tls_of(config.http)
    server = _Server(context, launcher, tls)
    async with asyncio.TaskGroup() as tasks:  # the process ends when one of them fails; the launcher logs the reason
        tasks.create_task(manager.run())
        tasks.create_task(_handle_launcher(launcher, context, exporter, tls))
        if exporter is not None:
            tasks.create_task(report_counts(exporter, to_router))
        if context.images is not None:
            tasks.create_task(_report_images(context.images, child_config.http_process, to_router))
        if context.stream_log is not None:
            tasks.create_task(context.stream_log.run())
            tasks.create_task(report_stream_log(context.stream_log, to_router))
        if context.batches is not None:
            tasks.create_task(_executor(context, context.batches).run())
        tasks.create_task(server.serve(sockets=_listeners(socket.socket(fileno=child_config.listen_fd))))


def _image_reader(config: ServerConfig, source: ModelSource, tokenizer: Tokenizer | None) -> ImageReader | None:
    """None: requests have no images, and Pillow is not needed."""
    if not config.http.reads_media:
        return None
    from lightserve.media.fetch.fetcher import MEDIA_FLAGS, Fetcher
    from lightserve.media.layout import read_layout
    from lightserve.media.make_reader import make_reader
    from lightserve.media.reader import MB
    from lightserve.outbound.urls import UrlRules

    http = config.http
    layout = read_layout(read_image_files(source), http.max_image_tokens)
    rules = UrlRules(MEDIA_FLAGS, http.allowed_media_domains, http.media_private_hosts, http.allow_http_media)
    max_mb = http.max_audio_mb if "audio" in layout.kinds else http.max_image_mb
    fetcher = None if http.no_media_urls else Fetcher(rules, max_mb * MB, http.media_timeout)
    return make_reader(source, layout, tokenizer, (http.media_limits, max_mb * MB), fetcher)


async def _report_images(images: ImageReader, process: int, to_router: Sender[ToRouter]) -> None:
    """The router adds up what the HTTP processes have counted."""
    while True:
        await asyncio.sleep(REPORT_S)
        if counts := images.stats.take(process):
            to_router.send(counts)


def _executor(context: ServerContext, store: BatchStore) -> BatchExecutor:
    config = context.config
    runner = LineRunner(build_batch_app(context), logs_requests=not config.disable_log_requests)
    return BatchExecutor(store, runner, context.manager, (config.batch_concurrency, config.body_limit))


def _listeners(sock: socket.socket) -> list[socket.socket]:
    """Duplicates of the socket: the event loop accepts one connection per iteration from each."""
    return [sock, *(sock.dup() for _ in range(ACCEPTS_PER_ITERATION - 1))]


class _Server(uvicorn.Server):
    """Sends Ready when it listens; the launcher handles signals."""

    def __init__(self, context: ServerContext, launcher: LauncherConnection, tls: ssl.SSLContext | None) -> None:
        config = uvicorn.Config(
            build_app(context),
            http=QuietProtocol if context.config.disable_log_requests else LimitedProtocol,
            loop="none",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,  # nothing asks for the address or the scheme of the client
            timeout_keep_alive=KEEP_ALIVE_S,
            ssl_context_factory=None if tls is None else lambda *_: tls,
        )
        super().__init__(config)
        self._launcher = launcher

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        collect_rarely()
        self._launcher.send(Ready())
        for body in FIRST_BODIES:  # while the model loads, instead of in somebody's first request
            body.model_rebuild()

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def _tls_of(config: HttpConfig) -> ssl.SSLContext | None:
    if config.ssl_certfile is None:
        return None
    return server_context(config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)


def _renew_certificate(tls: ssl.SSLContext | None, config: HttpConfig) -> None:
    """New connections get the certificate that is in the files now. The launcher has checked them."""
    if tls is None or config.ssl_certfile is None:
        return
    try:
        tls.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError:
        logger.exception("the certificate %s cannot be read again", config.ssl_certfile)


async def _handle_launcher(
    launcher: LauncherConnection, context: ServerContext, exporter: SpanExporter | None, tls: ssl.SSLContext | None
) -> None:
    """Handle the messages of the launcher."""
    manager = context.manager
    async with asyncio.TaskGroup() as tasks:
        while True:
            message = await launcher.recv()
            if isinstance(message, EngineInfo):
                manager.engine_info(message)
                context.grammars.start()
            elif isinstance(message, EngineDied):
                manager.engine_died(message.message)
            elif isinstance(message, Keys):
                context.keys.use(message.api_key, message.admin_key)
            elif isinstance(message, CertificateRenewed):
                _renew_certificate(tls, context.config)
            elif isinstance(message, Drain):
                manager.drain()
                tasks.create_task(_report_drained(launcher, manager, exporter))


async def _report_drained(
    launcher: LauncherConnection, manager: HttpServerManager, exporter: SpanExporter | None
) -> None:
    await manager.wait_drained()
    if exporter is not None:
        await asyncio.to_thread(exporter.close, CLOSE_S)
    launcher.send(Drained())


if __name__ == "__main__":
    run_child("httpserver", main)
