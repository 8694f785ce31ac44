"""Two ranks of the device's collective library, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from lightserve.common.device import Device, device_named
from lightserve.common.parallel import ParallelSizes, connect_ranks
from lightserve.conformance.finding import CheckError, NotOfferedError, expect
from lightserve.errors import ServerError

RANKS = 2
TIMEOUT_S = 120.0


def check_ranks(platform: Device) -> str:
    try:
        platform.torch_device(RANKS - 1)
    except ServerError as error:
        raise NotOfferedError(f"this machine has too few devices ({error})") from error
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __name__, platform.name, f"file://{Path(folder) / 'store'}"]
        processes = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for rank in range(RANKS)
        ]
        try:
            outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
        except subprocess.TimeoutExpired as error:
            raise CheckError(f"{RANKS} ranks did not finish their collectives in {TIMEOUT_S:.0f} s") from error
        finally:
            for process in processes:
                process.kill()
    for rank, process in enumerate(processes):
        expect(process.returncode == 0, f"rank {rank} fails: {outputs[rank].strip()[-200:]}")
    return f"{RANKS} ranks by {platform.comm_backend}: sums, gathers, scatters, sends"


def _run_rank(name: str, store: str, rank: int) -> None:
    platform = device_named(name)
    device = platform.torch_device(rank)
    platform.set_current(device)
    sizes = ParallelSizes(tp=RANKS, pp=1, dp=1, ep=1)
    group = connect_ranks(rank, sizes, store, platform.comm_backend).tp
    row = torch.arange(4, device=device, dtype=torch.float32) + 10 * rank
    expect(group.all_reduce(row.clone()).tolist() == [10, 12, 14, 16], "a sum differs")
    expect(group.all_gather(row[None]).tolist() == [[0, 1, 2, 3, 10, 11, 12, 13]], "a gather differs")
    expect(group.all_gather_rows(row[None]).tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]], "a gather of rows differs")
    both = torch.stack((row, row + 1))
    expect(group.reduce_scatter_rows(both).tolist() == [[10 + 2 * (i + rank) for i in range(4)]], "a scatter differs")
    expect(group.min_of_ranks(rank + 5, device) == 5, "the least number differs")
    if rank == 0:
        work = group.send_to_next(row)
        if work is not None:
            work.wait()
    else:
        received = torch.empty_like(row)
        group.receive_from_previous(received)
        expect(received.tolist() == [0, 1, 2, 3], "what the rank before sends differs")


if __name__ == "__main__":
    _run_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]))
