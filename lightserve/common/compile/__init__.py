"""Compilation of Triton kernels before the server is ready.

A model launches some hundred kernels. Compiled one after the other at first use, they take longer than reading the
weights. So a worker compiles them ahead and in parallel:

1. ``cache.py``: before Triton is imported, the worker makes sure that Triton's cache folder can be written. If the
   cache holds no kernels yet, it starts a compile server (``client.py``).
2. ``server.py``: the compile server imports all kernels while the worker imports torch. It forks one process for each
   kernel that it is asked for. It needs no GPU and writes the result to Triton's cache.
3. ``ahead.py``: the worker runs its steps once under ``compile_ahead``. Each launch of an uncompiled kernel starts a
   compilation in a thread and returns. The thread asks the compile server and then loads the kernel from the cache. If
   the server fails, the thread compiles the kernel itself.
4. The worker closes the compile server and runs the steps for real.
"""
