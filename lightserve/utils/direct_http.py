"""Requests to other processes of a deployment."""

from __future__ import annotations

import ssl
import urllib.request


def direct_opener(tls: ssl.SSLContext | None = None) -> urllib.request.OpenerDirector:
    """Opens URLs. Unlike ``urlopen`` it ignores http_proxy: a proxy of the machine would get the keys of clients."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls))
