"""What surrounds every request: its id, the checks of host and API key, the throttle, the handler of exceptions.

Pure ASGI in one class: a request costs some 5 us, a chunk of a stream one plain function call of 0.1 us.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import os
import re
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightserve.errors import ForbiddenError, UnauthorizedError
from lightserve.httpserver.http.access_log import ResponseRecord
from lightserve.httpserver.http.errors import ErrorFormat, error_response, format_of, log_error
from lightserve.httpserver.http.key_limits import KeyLimiter
from lightserve.httpserver.http.paths import route_path
from lightserve.utils.key_spec import parse_key
from lightserve.utils.net import is_local

OPEN_PATHS = frozenset({"/health", "/healthz", "/liveness", "/readiness"})  # for probes, which have no key
# they change the server, or show or change requests of other clients
ADMIN_PATHS = frozenset(
    {"/abort_request", "/start_profile", "/stop_profile", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
)
ADMIN_PREFIX = "/debug/"
ANY = "*"
# no public name server has names below these: of this machine, and of a container's host (host.docker.internal)
LOCAL_NAMES = ("localhost", "*.localhost", "*.internal")
MAX_SHOWN_HOST = 100  # characters of a refused name
MAX_ID_LENGTH = 128
PER_ITERATION = 2  # some 1 ms of parsing, checking and encoding; 2,500 requests take no longer than with 8
_NOT_IN_AN_ID = re.compile(rb"[^\w.:-]+")  # of bytes, so \w is ASCII


class AllowedHosts:
    """The names of this server that clients may use in the header Host. They may begin with ``*.``.

    The name of a foreign web page can resolve to 127.0.0.1 (DNS rebinding). To the browser, the page and this server
    then have the same origin, so the page may send requests and read responses. Their Host is the name of the page.
    An address is always allowed.
    """

    def __init__(self, names: Iterable[str]) -> None:
        names = [_plain(name) for name in names]
        self._is_any = ANY in names
        self._names = frozenset(names)
        self._endings = tuple(name.removeprefix(ANY) for name in names if name.startswith(f"{ANY}."))

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        host = headers.get(b"host", b"")
        if self._is_any or not host:  # browsers always send it
            return
        name = _plain(host.decode("latin-1"))
        if name in self._names or name.endswith(self._endings) or _is_address(name):
            return
        problem = f"{name[:MAX_SHOWN_HOST]!r} is not a name of this server; --allowed_hosts adds names, * allows all"
        raise ForbiddenError(f"the header Host: {problem}")


def allowed_hosts(listening: str, names: Sequence[str]) -> AllowedHosts:
    """``listening``: --host, ``names``: --allowed_hosts. Without names, a server that others can reach allows any: only
    the operator knows under which names they do.
    """
    if not names and not is_local(listening):
        return AllowedHosts([ANY])
    return AllowedHosts([*LOCAL_NAMES, *_machine_names(), listening, *names])


def _machine_names() -> list[str]:
    name = socket.gethostname()
    first_label = name.partition(".")[0]
    return [name, first_label, f"{first_label}.local"]


def _plain(host: str) -> str:
    """In lower case, without the port, the brackets of an IPv6 address and the dot at the end of a full name."""
    name, _, port = host.rpartition(":")
    without_port = name if name and port.isdecimal() and (":" not in name or name.endswith("]")) else host
    return without_port.lower().strip("[]").rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


ANY_HOST = AllowedHosts([ANY])


class ApiKeys:
    """The keys of clients and of admins."""

    def __init__(
        self, api_keys: Iterable[str] = (), admin_keys: Iterable[str] = (), limiter: KeyLimiter | None = None
    ) -> None:
        self.limiter = limiter or KeyLimiter()
        self.use(api_keys, admin_keys)
        self.more_admin_paths: frozenset[str] = frozenset()  # of features that a flag turns on

    def use(self, api_keys: Iterable[str], admin_keys: Iterable[str]) -> None:
        """Only these are valid from now on."""
        specs = list(map(parse_key, api_keys))
        self.limiter.use(specs)
        self.of_clients = KeyDigests(spec.key for spec in specs)
        self.of_admins = KeyDigests(parse_key(key).key for key in admin_keys)

    def owner(self, headers: Mapping[bytes, bytes]) -> str:
        """A digest of the valid key that a request has; "" without one: all such clients are one owner."""
        if not self.of_clients and not self.of_admins:
            return ""
        given = key_digests(headers)
        digest = self.of_clients.find(given) or self.of_admins.find(given)
        return "" if digest is None else digest.hex()

    def counted(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> AbstractContextManager[None]:
        """A request with a valid key, or without one: counts it. Raises KeyLimitError."""
        if method != "POST" or not self.of_clients:
            return nullcontext()
        given = key_digests(headers)
        digest = self.of_clients.find(given)
        if digest is None or given in self.of_admins:
            return nullcontext()
        return self.limiter.counted(digest, path)

    def guards(self, path: str) -> bool:
        """Whether the path needs an admin key, where there are any."""
        return is_admin_path(path) or path in self.more_admin_paths

    def administers(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request may do what needs an admin key: it has one, or there are none."""
        return not self.of_admins or key_digests(headers) in self.of_admins

    def sees_all(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request may see and abort those of all clients: with an admin key, or if clients have no keys."""
        return not self.of_clients or key_digests(headers) in self.of_admins


class KeyDigests:
    """Keys that are compared in constant time."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __contains__(self, given: Sequence[bytes]) -> bool:
        return self.find(given) is not None

    def find(self, given: Sequence[bytes]) -> bytes | None:
        """The first of the given digests that is one of these; None: there is none."""
        equal = [digest for digest in given for known in self._digests if hmac.compare_digest(digest, known)]
        return equal[0] if equal else None


class RequestMiddleware:
    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        error_formats: Sequence[ErrorFormat] = (),
        is_public: Callable[[str, str, Mapping[bytes, bytes]], bool] = lambda method, path, headers: False,
        logs_refusals: bool = True,
        hosts: AllowedHosts = ANY_HOST,
    ) -> None:
        """``is_public`` tells whether a method and a path, with these headers, need no key."""
        self._app = app
        self._hosts = hosts
        self._throttle = RequestThrottle()
        self._keys = keys
        self._error_formats = error_formats
        self._is_public = is_public
        self._logs_refusals = logs_refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # lifespan; there are no websocket routes
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        id_bytes = _clean(headers.get(b"x-request-id", b"")) or os.urandom(8).hex().encode()
        request_id = scope.setdefault("state", {})["request_id"] = id_bytes.decode()
        path = route_path(scope)
        record = scope["state"]["record"] = ResponseRecord(scope["method"], scope["path"], self._logs_refusals)
        error_format = format_of(self._error_formats, path)
        id_header = None if error_format is None else error_format.id_header
        is_started = False

        def send_with_id(message: Message) -> Awaitable[None]:  # not async: saves a coroutine a chunk
            nonlocal is_started
            if not is_started:
                is_started = True
                final_id: str = scope["state"]["request_id"]  # a field of the body may have set it meanwhile
                record.start(message["status"], final_id)
                sent_id = final_id.encode()
                extra = () if id_header is None else ((id_header, sent_id),)
                more = scope["state"].get("response_headers", ())
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", sent_id), *extra, *more]
                scope["state"]["status"] = message["status"]
                warning: str | None = scope["state"].get("warning")
                if warning is not None:
                    message["headers"].append((b"warning", warning.encode()))
            return send(message)

        try:
            self._hosts.check(headers)
            if path not in OPEN_PATHS:
                self._check_key(scope["method"], path, headers)
            with self._keys.counted(scope["method"], path, headers):
                if scope["method"] == "POST":
                    await self._throttle.wait()
                await self._app(scope, receive, send_with_id)
        except Exception as error:
            log_error(error, request_id, record)
            if is_started:
                raise  # uvicorn closes the connection, so the client sees that the response is incomplete
            await error_response(error, request_id, error_format)(scope, receive, send_with_id)
        finally:
            record.end()

    def _check_key(self, method: str, path: str, headers: dict[bytes, bytes]) -> None:
        """Where admin keys are set, admin paths need one. An admin key is valid on the other paths too."""
        keys = self._keys
        needs_admin = bool(keys.of_admins) and keys.guards(path)
        if not keys.of_clients and not needs_admin:
            return
        given = key_digests(headers)
        is_admin, is_client = given in keys.of_admins, given in keys.of_clients
        if is_admin or (is_client and not needs_admin):
            return
        if self._is_public(method, path, headers):
            return
        if is_client:
            raise ForbiddenError("this needs an admin key")
        raise UnauthorizedError("the API key is missing or wrong; send it as Authorization: Bearer KEY")


class RequestThrottle:
    """Lets some requests begin in one iteration of the event loop; the others wait for later iterations, in order.

    An iteration takes as long as all requests that begin in it: with two thousand at once, /health and running streams
    would wait a second.
    """

    def __init__(self, per_iteration: int = PER_ITERATION) -> None:
        self._per_iteration = per_iteration
        self._begun = 0  # in this iteration
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        if self._begun < self._per_iteration and not self._waiting:
            self._begin()
            return
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(admitted)
        await admitted

    def _begin(self) -> None:
        if self._begun == 0:
            asyncio.get_running_loop().call_soon(self._end_iteration)
        self._begun += 1

    def _end_iteration(self) -> None:
        self._begun = 0
        while self._waiting and self._begun < self._per_iteration:
            admitted = self._waiting.popleft()
            if not admitted.done():  # else the client has disconnected
                self._begin()
                admitted.set_result(None)


def is_admin_path(path: str) -> bool:
    return path in ADMIN_PATHS or path.startswith(ADMIN_PREFIX)


def key_digests(headers: Mapping[bytes, bytes]) -> list[bytes]:
    """Of the API keys in the headers of a request."""
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    keys = [headers.get(b"x-api-key", b""), bearer.strip() if scheme.lower() == b"bearer" else b""]
    return [hashlib.sha256(key).digest() for key in keys if key]


def _clean(request_id: bytes) -> bytes:
    return _NOT_IN_AN_ID.sub(b"", request_id[:MAX_ID_LENGTH])
