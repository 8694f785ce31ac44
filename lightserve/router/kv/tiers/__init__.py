"""Slower memory below the KV pool, where prefixes go that the prefix cache evicts.

The router decides and the workers copy. ``pool_blocks.py`` knows which blocks of tokens are in the pool,
``host_blocks.py`` which are in host memory, and ``gate.py`` whether a load is faster than computing.
``stored_blocks.py`` moves blocks down when the prefix cache evicts them, ``tiers.py`` loads them for waiting requests,
and ``lower.py`` reads and writes the tiers below host memory.
"""
