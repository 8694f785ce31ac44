"""Ops that are faster on a CPU than their definitions. Importing this registers two backends.

"cpu" computes with torch and numpy, "cpu_native" with the C library in ``csrc``, if it was built.
"""

from lightserve.common import ops

ops.import_implementations(__name__, __path__)
