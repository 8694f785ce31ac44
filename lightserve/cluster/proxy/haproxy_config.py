"""The configuration of HAProxy in front of several gateways. Pure: settings in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

CHECKED = ("gateways", "alive")  # backends that check their servers
BACKENDS = (*CHECKED, "first", "by_key")  # each has a server for each gateway
NOT_KNOWN_YET = "127.0.0.1:9"  # until the gateway has an address; its server is in maintenance

FOR_ALL = ("/abort_request", "/debug/requests")  # see fan_out.py
FOR_FIRST = ("/metrics",)
BY_KEY = ("/v1/responses",)

TEXT = """\
# HAProxy in front of the gateways of a LightServe deployment. Written at every start: changes are lost.
# Addresses of gateways change at run time, through the socket below; `show servers state` there prints them.
global
    stats socket {folder}/haproxy.sock mode 600 level admin

defaults
    mode http
    # A request may wait, and a stream may be silent, as long as the gateway allows it.
    timeout connect 2s
    timeout http-request 60s
    timeout http-keep-alive 75s
    timeout client 24h
    timeout server 24h
    # A client that does not read what its gateway has left behind.
    timeout client-fin 60s
    # A machine that was switched off is noticed by its silence.
    option clitcpka
    option srvtcpka
    srvtcpka-idle 5s
    srvtcpka-intvl 2s
    srvtcpka-cnt 3
    # Tokens are sent on at once. A client that leaves ends its request.
    option http-no-delay
    option abortonclose
    option forwardfor
    # A connection for each request: a gateway that refuses it has not seen the request, and another one gets it.
    # A request that was sent on is never sent again.
    option http-server-close
    retries 3
    retry-on conn-failure
    option redispatch 1
    errorfile 502 {folder}/502.http
    errorfile 503 {folder}/503.http
    errorfile 504 {folder}/504.http

frontend clients
    bind {bind}
    use_backend for_all if {{ path {for_all} }} || {{ path_beg {below_all} }}
    use_backend first if {{ path {for_first} }}
    use_backend by_key if {{ path {by_key} }} || {{ path_beg {below_key} }}
    use_backend alive if {{ nbsrv(gateways) eq 0 }}
    default_backend gateways

# Gateways that can generate tokens now.
backend gateways
    balance leastconn
    option httpchk GET /health
    default-server inter 1s fastinter 250ms fall 2 rise 1
{checked}

# If there is none: gateways that run. They refuse the request or let it wait, as without a proxy.
backend alive
    balance leastconn
    option httpchk GET /liveness
    default-server inter 1s fastinter 250ms fall 2 rise 1
{checked}

# Every gateway has the counters of all engines. But what it counts itself would jump between two scrapes.
backend first
    balance first
{tracking}

# A gateway stores responses: those of one API key are in one gateway.
backend by_key
{balance_by_key}
{tracking}

# Requests about the requests of all gateways.
backend for_all
    server fan_out unix@{folder}/fan_out.sock
"""
BALANCE_BY_KEY = """\
    http-request set-var-fmt(txn.key) "%[req.hdr(authorization)] %[req.hdr(x-api-key)]"
    balance hash var(txn.key)
    hash-type consistent"""
ERRORS = {
    502: ("Bad Gateway", "the gateway closed the connection before it answered"),
    503: ("Service Unavailable", "no gateway can be reached"),
    504: ("Gateway Timeout", "the gateway does not answer"),
}


class ProxySettings(msgspec.Struct, frozen=True):
    host: str
    port: int  # 0: any free one
    num_gateways: int
    has_keys: bool = False  # clients have API keys
    certfile: str | None = None  # for clients; gateways have none
    keyfile: str | None = None
    root_path: str = ""

    @property
    def scheme(self) -> str:
        return "http" if self.certfile is None else "https"


def config_text(settings: ProxySettings, port: int, gateways: Sequence[str], folder: Path) -> str:
    """``gateways``: HOST:PORT of each, or "" if it is not known yet."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    bind = f"{host}:{port}" if settings.certfile is None else f"{host}:{port} ssl crt {folder}/proxy.pem"
    servers = [f"    server gateway-{number} {address or NOT_KNOWN_YET}" for number, address in enumerate(gateways)]
    return TEXT.format(
        folder=folder,
        bind=bind,
        checked="\n".join(
            f"{server} check{'' if address else ' disabled'}" for server, address in zip(servers, gateways, strict=True)
        ),
        tracking="\n".join(f"{server} track alive/gateway-{number}" for number, server in enumerate(servers)),
        balance_by_key=BALANCE_BY_KEY if settings.has_keys else "    balance first",
        for_all=_paths(FOR_ALL, settings),
        below_all=_paths([f"{path}/" for path in FOR_ALL], settings),
        for_first=_paths(FOR_FIRST, settings),
        by_key=_paths(BY_KEY, settings),
        below_key=_paths([f"{path}/" for path in BY_KEY], settings),
    )


def _paths(paths: Sequence[str], settings: ProxySettings) -> str:
    """Routes match with and without --root_path."""
    roots = ["", settings.root_path.rstrip("/")] if settings.root_path else [""]
    return " ".join(root + path for root in roots for path in paths)


def error_file(status: int) -> bytes:
    """A whole HTTP response, in the format of the gateways' errors."""
    reason, message = ERRORS[status]
    fields = {"message": f"{message}; retry later", "type": "server_error", "param": None, "code": None}
    body = msgspec.json.encode({"error": fields})
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Retry-After: 1\r\nConnection: close\r\n\r\n".encode() + body
