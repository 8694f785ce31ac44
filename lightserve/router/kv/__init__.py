"""The KV pool and its prefix cache, and KV that comes from elsewhere: from slower memory, or from other engines.

``source.py`` is the contract of such places, and all that the scheduler knows of them. ``remote_prefill.py`` is KV that
prefill engines send, ``sends.py`` KV that this engine sends, and ``tiers`` slower memory.

``group_pool.py`` is the contract of layers that have a pool of their own, ``sliding_window.py`` the first of them.
"""
