"""What a running server reads again: key files when they change; on SIGHUP also --config and the certificate.

    a key file has changed ─▶ its keys replace the old ones in every HTTP process
    SIGHUP ─▶ --config, key files, certificate ─▶ a line for each flag that has changed and needs a restart

A file that cannot be used changes nothing: the keys of before stay valid, and a line says why.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

from lightserve.config import HttpConfig, ServerConfig
from lightserve.errors import LightserveError, ServerError, with_docs
from lightserve.links.tls import server_context
from lightserve.messages.control import CertificateRenewed
from lightserve.server.banner import print_error, print_line
from lightserve.server.keys import with_keys
from lightserve.server.process_group import ProcessGroup

INTERVAL_S = 1.0  # between two looks at the key files
OF_KEYS = ("api_key", "api_key_file", "admin_key", "admin_key_file")  # flags that a running server can change

Versions = Sequence[tuple[int, int, int] | None]


class Reloader:
    def __init__(self, flags: ServerConfig, parse: Callable[[], ServerConfig]) -> None:
        """``flags``: as they were at the start, without the keys of files. ``parse`` reads them and --config again."""
        self._start = self._flags = flags
        self._parse = parse
        self._requested = asyncio.Event()
        self._versions = _versions(flags.http)

    def request(self) -> None:
        """A signal asks for it."""
        self._requested.set()

    async def run(self, processes: ProcessGroup) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._requested.wait(), INTERVAL_S)
            if self._requested.is_set():
                self._requested.clear()
                self._read_all(processes)
            elif _versions(self._flags.http) != self._versions:
                self._read_keys(processes)

    def _read_all(self, processes: ProcessGroup) -> None:
        print_line("SIGHUP: keys and certificates are read again; the model and other files only at a restart")
        self._read_flags()
        self._read_keys(processes)
        http = self._start.http
        if http.ssl_certfile is not None and _is_usable(http):
            processes.send_http(CertificateRenewed())
            print_line(f"the certificate {http.ssl_certfile} is read again, for new connections")

    def _read_flags(self) -> None:
        """Those of --config may have changed."""
        try:
            parsed = self._parse()
        except (LightserveError, SystemExit) as error:  # a parser exits after it has printed why
            print_error(f"the flags stay as they were: {error if isinstance(error, LightserveError) else '--config'}")
            return
        for name in _changed(self._start, parsed):
            print_line(f"--{name} has changed; restart the server to use it")
        self._flags = replace(self._flags, http=_with_key_flags(self._flags.http, parsed.http))

    def _read_keys(self, processes: ProcessGroup) -> None:
        self._versions = _versions(self._flags.http)
        old = processes.http
        try:
            _require_files(self._flags.http)
            new = with_keys(self._flags).http
            _require_same_kinds(old, new)
        except ServerError as error:
            print_error(f"the keys stay as they were: {with_docs(error)}")
            return
        if (new.api_key, new.admin_key) != (old.api_key, old.admin_key):
            processes.use_keys(new.api_key, new.admin_key)
            print_line(f"keys are read again: {len(new.api_key)} API keys, {len(new.admin_key)} admin keys")


def _versions(http: HttpConfig) -> Versions:
    """What differs after a file was written or replaced; None: there is none."""
    return [_version(name) for name in (http.api_key_file, http.admin_key_file) if name is not None]


def _version(name: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(os.path.expanduser(name))  # of the target of a link: Kubernetes replaces links
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _require_files(http: HttpConfig) -> None:
    """A pipe, such as <(command) of a shell, can be read only once."""
    for name in filter(None, (http.api_key_file, http.admin_key_file)):
        path = Path(name).expanduser()
        if path.exists() and not path.is_file():
            raise ServerError(f"{path} is not a regular file, and is read only at the start")


def _require_same_kinds(old: HttpConfig, new: HttpConfig) -> None:
    """Without keys of a kind, everybody could do what needs one."""
    if (old.api_key and not new.api_key) or (old.admin_key and not new.admin_key):
        raise ServerError("no key would be left; restart the server to serve without keys")


def _with_key_flags(http: HttpConfig, parsed: HttpConfig) -> HttpConfig:
    return replace(http, **{name: getattr(parsed, name) for name in OF_KEYS})


def _changed(old: ServerConfig, new: ServerConfig) -> list[str]:
    """Flags that need a restart."""
    pairs = [(getattr(old, section.name), getattr(new, section.name)) for section in fields(ServerConfig)]
    return [
        spec.name
        for before, after in pairs
        for spec in fields(before)
        if spec.name not in OF_KEYS and getattr(before, spec.name) != getattr(after, spec.name)
    ]


def _is_usable(http: HttpConfig) -> bool:
    try:
        server_context(http.ssl_certfile or "", http.ssl_keyfile, http.ssl_ca_certs)
    except ServerError as error:
        print_error(f"the certificate stays as it was: {error}")
        return False
    return True
