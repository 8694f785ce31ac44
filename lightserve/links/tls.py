"""HTTPS: the server's certificate, and the certificates that clients must have."""

from __future__ import annotations

import ssl
from typing import NamedTuple

from lightserve.errors import ServerError


def server_context(certfile: str, keyfile: str | None, ca_certs: str | None) -> ssl.SSLContext:
    """TLS 1.2 or newer. With ``ca_certs``, every client must present a certificate signed by one of them."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    names = certfile if keyfile is None else f"{certfile} and {keyfile}"
    try:
        context.load_cert_chain(certfile, keyfile, password=_no_password)
    except (OSError, ValueError) as error:
        raise ServerError(
            f"cannot use {names} for HTTPS ({_reason(error)}); "
            "set --ssl_certfile and --ssl_keyfile to a certificate chain and its private key in PEM, without a password"
        ) from error
    if ca_certs is not None:
        try:
            context.load_verify_locations(ca_certs)
        except (OSError, ValueError) as error:
            raise ServerError(
                f"--ssl_ca_certs: cannot use {ca_certs} ({_reason(error)}); use PEM certificates"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def trust_exactly(certificate: str) -> ssl.SSLContext:
    """For clients of a server that has this certificate, whatever the name of its address is."""
    context = ssl.create_default_context(cafile=certificate)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    return context


class PeerContexts(NamedTuple):
    server: ssl.SSLContext
    client: ssl.SSLContext


def peer_contexts(pem: str) -> PeerContexts:
    """For a link whose two ends have the same certificate and private key, and accept no other. TLS 1.3."""
    contexts = PeerContexts(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), trust_exactly(pem))
    contexts.server.verify_mode = ssl.CERT_REQUIRED
    contexts.server.load_verify_locations(pem)
    contexts.server.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    contexts.server.num_tickets = 0  # no connection is resumed
    for context in contexts:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(pem, password=_no_password)
    return contexts


def _no_password() -> str:
    """Without this callback, OpenSSL would ask for a password on the terminal."""
    raise ValueError("the private key has a password")


def _reason(error: Exception) -> str:
    """A short reason: OpenSSL's own text may be empty, or end with a place in its source."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not PEM").lower().replace("_", " ")
    return error.strerror or "unreadable" if isinstance(error, OSError) else str(error)
