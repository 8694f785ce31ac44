"""KV below the KV pool: prefixes that the prefix cache evicts are kept in slower memory, and loaded from there.

The router decides, the workers copy. ``pool_blocks.py`` knows which blocks of tokens are in the pool,
``host_blocks.py`` which are in host memory, and ``gate.py`` whether a load is faster than computing.
``stored_blocks.py`` moves blocks down when the prefix cache evicts them, and ``tiers.py`` loads them for waiting
requests.
"""
