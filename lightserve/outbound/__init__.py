"""Connections to hosts that clients name. A client must not reach through them what it could not reach itself:
one strict parser reads a URL, all addresses of its host must be public, and the checked address is dialled."""
