"""Copies, copies beside the steps, graphs, timing and memory of a device."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from lightserve.common.device import Device, in_host_memory
from lightserve.conformance.finding import Check, NotOfferedError, expect

BLOCKS, BLOCK = 24, (2, 3, 64)
SHARE = 0.9  # of the memory for weights and KV, as the server's default
MIB = 1 << 20


class Hardware:
    def __init__(self, platform: Device, device: torch.device) -> None:
        self._platform, self._device = platform, device

    def checks(self) -> dict[str, Check]:
        return {
            "copy to the device": self.to_device,
            "copy to the host": self.to_host,
            "copies beside the steps": self.side_copies,
            "graphs": self.graphs,
            "work as one launch": self.one_launch,
            "time of work": self.timing,
            "memory of work": self.peak,
            "KV budget": self.budget,
        }

    def _numbers(self, count: int) -> Tensor:
        return torch.arange(count, device=self._device, dtype=torch.int64)

    def to_device(self) -> str:
        """The array may change once the call has returned, if the device has a copy of it."""
        for dtype in (np.int32, np.int64, np.float32, np.uint8):
            array = np.arange(1000).astype(dtype)
            on_device = self._platform.to_device(array, self._device)
            expect(on_device.device.type == self._platform.torch_type, f"a copy of {dtype.__name__} is elsewhere")
            expect(on_device.cpu().tolist() == array.tolist(), f"a copy of {dtype.__name__} differs")
        memory = in_host_memory(self._platform, np.arange(7))
        expect(memory.to(self._device, non_blocking=True).tolist() == list(range(7)), "host memory reads differently")
        return "4 dtypes"

    def to_host(self) -> str:
        """What the device computes afterwards does not change a copy that has begun."""
        numbers = self._numbers(100_000)
        copy = self._platform.copy_to_host(numbers * 3, numbers.float())
        later = self._numbers(100_000) * 5
        first, second = copy.tensors()
        expect(first.device.type == "cpu" and second.device.type == "cpu", "the copies are not in host memory")
        expect(torch.equal(first, torch.arange(100_000) * 3), "a copy differs")
        expect(torch.equal(second, torch.arange(100_000).float()), "the second copy differs")
        return f"of {later.numel()} numbers"

    def side_copies(self) -> str:
        """Blocks go down, are overwritten on the device, and come up again."""
        stream = self._platform.copy_stream(self._device)
        pool = torch.randn(BLOCKS, *BLOCK, device=self._device)
        before = pool.cpu().clone()
        hosts = [self._platform.host_memory(BLOCK, pool.dtype) for _ in range(BLOCKS)]

        def gather(some: slice, blocks: Tensor) -> None:
            blocks.copy_(pool[some])

        def scatter(some: slice, blocks: Tensor) -> None:
            pool[some] = blocks

        arrive = stream.down(hosts, gather)
        pool.zero_()
        arrive()
        stream.finish_down()
        expect(torch.equal(torch.stack(list(hosts)), before), "a copy down has what a later step wrote")
        took_s = stream.up(hosts, scatter, stream.mark()).result(60)
        expect(torch.equal(pool.cpu(), before), "a copy up differs")
        expect(took_s >= 0, "the time of a copy up is negative")
        return f"{BLOCKS} blocks down and up"

    def graphs(self) -> str:
        ranges = self._platform.profile(self._device).graphs
        table = torch.randn(64, 16, device=self._device)

        def step(inputs: Tensor, size: int) -> Tensor:
            return table[inputs[:size]].relu().sum(1)

        graphs = self._platform.graphs(step)
        if graphs is None:
            expect(ranges is None, "the profile has shapes for graphs, and the device has none")
            raise NotOfferedError("none; steps are launched kernel by kernel")
        expect(ranges is not None, "the device has graphs, and its profile no shapes for them")
        with torch.inference_mode():
            step(self._numbers(8), 8)
            graphs.capture((size, self._numbers(8)) for size in (8, 4))
            expect(8 in graphs and 4 in graphs and 2 not in graphs, "captured keys are not found")
            for size in (4, 8, 4):
                numbers = torch.randint(0, 64, (8,))
                inputs = in_host_memory(self._platform, numbers.numpy())
                out = graphs.replay(size, inputs).cpu()
                expect(
                    torch.allclose(out, step(numbers.to(self._device), size).cpu()), "a replay differs from the work"
                )
        return "2 captured, replayed with other inputs"

    def one_launch(self) -> str:
        total = torch.zeros(8, device=self._device)
        run = self._platform.as_one_launch(lambda: total.add_(1))
        before = float(total[0])
        run()
        run()
        expect(float(total[0]) == before + 2, f"2 launches add {float(total[0]) - before:g}")
        return "runs once a call"

    def timing(self) -> str:
        side = 512
        a = torch.randn(side, side, device=self._device)
        self._platform.seconds_of(lambda: a @ a)
        begin = time.perf_counter()
        seconds = self._platform.seconds_of(lambda: [a @ a for _ in range(20)])
        around = time.perf_counter() - begin
        expect(0 < seconds <= around * 1.1, f"20 products are said to take {seconds:.1e} s, which took {around:.1e} s")
        return f"a product of {side} x {side} takes {seconds / 20 * 1e6:.0f} us"

    def peak(self) -> str:
        size = 32 * MIB
        peak = self._platform.peak_bytes(self._device, lambda: _allocate(size, self._device))
        if peak == 0:
            raise NotOfferedError("not measured; the KV budget must leave room for it")
        expect(peak >= size or not self._platform.launches_async, f"{size} bytes of work are measured as {peak}")
        return f"{peak // MIB} MiB for work of {size // MIB} MiB"

    def budget(self) -> str:
        """What it promises can be allocated."""
        half, most = (self._platform.kv_budget(self._device, share) for share in (0.5, SHARE))
        expect(most > 0, "there is no memory for KV")
        expect(half <= most, f"a share of 0.5 gives {half} bytes, one of {SHARE} {most}")
        torch.empty(most, dtype=torch.uint8, device=self._device)
        self._platform.free_cached_memory()
        return f"{most / 1e9:.1f} GB, which can be allocated"


def _allocate(size: int, device: torch.device) -> None:
    torch.zeros(size, dtype=torch.uint8, device=device)
