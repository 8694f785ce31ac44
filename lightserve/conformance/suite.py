"""The sections of the suite, and the tables that they print. Each returns how many of its checks fail."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from lightserve.bench.ceilings import measure_ceilings
from lightserve.bench.kernel_cases import LLAMA3_8B, TINY, InputFactory, cases_of
from lightserve.bench.kernels import HEADER, row_of
from lightserve.common import ops
from lightserve.common.compile.client import compilers_for
from lightserve.common.device import Device
from lightserve.conformance.finding import Finding, run_checks
from lightserve.conformance.hardware import Hardware
from lightserve.conformance.model import Model
from lightserve.conformance.operators import OpReport, check_ops
from lightserve.conformance.ranks import check_ranks
from lightserve.conformance.tiny_model import write_tiny_model
from lightserve.errors import ServerError
from lightserve.utils.spelling import nearest
from lightserve.utils.terminal import Style

FAILED, PASSED, SKIPPED = ("red", "!!"), ("green", "ok"), ("yellow", "--")
LOADS = ("8", "2048", "8 x 1150", "64 x (2048+128)", "512 behind 8000")  # of the shapes of an 8B model
TINY_LOADS = ("3", "5")


class Suite:
    def __init__(
        self, platform: Device, folder: Path, op_names: Sequence[str] = (), ops_backends: Sequence[str] = ()
    ) -> None:
        """``op_names``: which are checked; empty: all. ``ops_backends``: those that are preferred to the device's."""
        self._platform, self._folder, self._style = platform, folder, Style(sys.stdout)
        self._device = platform.torch_device(0)
        self._op_names, self._ops_backends = _known_ops(op_names), list(ops_backends)
        self._bind()
        traits = platform.describe(self._device)
        print(f"device {platform.name}: {platform.profile(self._device).name}{f', {traits}' if traits else ''}")

    def _bind(self) -> None:
        self._platform.bind(self._device, ops_backends=self._ops_backends)

    def ops(self) -> int:
        with compilers_for(self._platform.name, str(self._folder / "compiler")):
            reports = check_ops(self._platform, self._device, self._op_names, self._bind)
        dtypes = list(dict.fromkeys(dtype for report in reports for dtype in report.errors))
        columns = "".join(f"{str(dtype).removeprefix('torch.'):>10}" for dtype in dtypes)
        print(f"\n    {'op':26} {'computed':9} {'by':22}{columns}   (distance from the definition)")
        for report in reports:
            errors = "".join(f"{report.errors.get(dtype, float('nan')):>10.1e}" for dtype in dtypes)
            problem = f"  {report.problems[0]}" if report.problems else ""
            color, mark = FAILED if problem else PASSED
            row = f"{report.name:26} {report.kind:9} {report.backend:22}{errors}{problem}"
            print(f"{self._style.paint(color, mark)}  {row}", flush=True)
        print(f"    {_summary(reports)}")
        return sum(bool(report.problems) for report in reports)

    def device(self) -> int:
        self._bind()
        return self._show("device", run_checks(Hardware(self._platform, self._device).checks()))

    def ranks(self) -> int:
        return self._show("ranks", run_checks({"collectives": lambda: check_ranks(self._platform)}))

    def model(self) -> int:
        write_tiny_model(self._folder)
        return self._show("model", run_checks(Model(self._platform, self._folder, self._ops_backends).checks()))

    def speed(self) -> int:
        """Of some ops at the shapes of a model of 8 billion weights. Nothing here fails."""
        self._bind()
        dtype, is_cpu = self._platform.dtypes[0], self._platform.torch_type == "cpu"
        loads, ceilings = TINY_LOADS if is_cpu else LOADS, measure_ceilings(self._device, dtype)
        print(f"\nspeed in {dtype}; {ceilings}")
        print(HEADER)
        for case in cases_of(TINY if is_cpu else LLAMA3_8B, dtype):
            if case.load in loads:
                print(row_of(case, InputFactory(self._device, dtype), ceilings), flush=True)
        return 0

    def _show(self, title: str, findings: Iterable[Finding]) -> int:
        print(f"\n{title}")
        num_failed = 0
        for finding in findings:
            color, mark = SKIPPED if finding.is_skipped else PASSED if finding.passes else FAILED
            num_failed += not finding.passes
            print(f"{self._style.paint(color, mark)}  {finding.name:26} {finding.text}", flush=True)
        return num_failed


def _known_ops(names: Sequence[str]) -> list[str]:
    for name in names:
        if name not in ops.OPS:
            near = nearest(name, ops.OPS)
            raise ServerError(f"--ops {name}: there is no such op{f'; did you mean {near}?' if near else ''}")
    return list(names or sorted(ops.OPS))


def _summary(reports: Sequence[OpReport]) -> str:
    counts = Counter(report.kind for report in reports)
    return ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
