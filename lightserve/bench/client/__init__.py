"""The load generator of ``lightserve bench serve``: requests, connections, timing. It imports no torch."""
