"""HTTPS: the server's certificate, and what it wants of clients."""

from __future__ import annotations

import ssl

from lightserve.errors import ServerError


def server_context(certfile: str, keyfile: str | None, ca_certs: str | None) -> ssl.SSLContext:
    """TLS 1.2 or newer. With ``ca_certs`` every client must show a certificate that one of them has signed."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    names = certfile if keyfile is None else f"{certfile} and {keyfile}"
    try:
        context.load_cert_chain(certfile, keyfile, password=_no_password)
    except (OSError, ValueError) as error:
        raise ServerError(
            f"ssl_certfile, ssl_keyfile: {names} cannot be used ({_reason(error)}); "
            "give a certificate chain and its private key in PEM, without a password"
        ) from error
    if ca_certs is not None:
        try:
            context.load_verify_locations(ca_certs)
        except (OSError, ValueError) as error:
            raise ServerError(f"ssl_ca_certs: {ca_certs} cannot be used ({_reason(error)}); give PEM") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    """Without it OpenSSL would ask whoever sits at the terminal."""
    raise ValueError("the private key has a password")


def _reason(error: Exception) -> str:
    """OpenSSL's own may be empty, or end with a place in its source."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no PEM").lower().replace("_", " ")
    return error.strerror or "unreadable" if isinstance(error, OSError) else str(error)
