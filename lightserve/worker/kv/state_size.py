"""How many rows a model has for the states of its recurrent layers: see router/kv/state_pool.py."""

from __future__ import annotations

from lightserve.common.basemodel import TpPartBaseModel
from lightserve.config import WorkerConfig
from lightserve.errors import ServerError
from lightserve.worker.kv.pools import tokens_in

MAX_SHARE = 0.5  # of the memory for KV and states
# Rows that are wanted: one to run and one to keep for each request that may run at once, or one for so many tokens of
# KV, if that is more: then short prompts have states in the prefix cache as long as they have KV there.
ROWS_A_REQUEST = 2
TOKENS_A_ROW = 256
# Tokens of a prompt that --deterministic computes in the same way in any step: a multiple of what the kernels compute
# together (CHUNK in cpu_kernel/state.py, CHUNK_TOKENS in triton_kernel/state/_linear_scan.py).
DETERMINISTIC_BLOCK = 64
MIN_ROWS = 2  # a request may read one and write another


def state_rows(config: WorkerConfig, model: TpPartBaseModel, budget: int) -> int:
    """``budget``: bytes for KV and states. The same on all ranks; 0: no layer is recurrent."""
    if not model.model_kv_layout.states:
        return 0
    if config.max_state_rows is not None:
        return config.max_state_rows
    kv_tokens = tokens_in(budget, model.kv_layout.bytes_per_token)
    wanted = max(ROWS_A_REQUEST * model.req_manager.max_reqs, kv_tokens // TOKENS_A_ROW)
    row_bytes = model.kv_layout.bytes_per_state_row
    most = int(MAX_SHARE * budget) // row_bytes if row_bytes else wanted  # a pipeline stage may have no such layer
    fits = model.args.parallel.min_of_engine(min(wanted, most), model.device)
    if fits < MIN_ROWS:
        raise ServerError(
            f"after the weights, half of the memory that is left holds {fits} recurrent states; "
            f"the server needs {MIN_ROWS}; use a smaller model or more ranks"
        )
    return fits
