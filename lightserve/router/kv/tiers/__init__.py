"""Slower memory below the KV pool, where prefixes go that the prefix cache evicts.

The router decides and the workers copy. ``pool_block_table.py`` knows which blocks of tokens are in the pool,
``cpu_block_table.py`` which are in host memory, and ``load_or_recompute.py`` whether a load is faster than computing.
``offload_queue.py`` moves blocks down when the prefix cache evicts them, ``tiers.py`` loads them for waiting requests,
and ``storage.py`` reads and writes the tiers below host memory.
"""
