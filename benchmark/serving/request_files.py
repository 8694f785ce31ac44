"""Which files of the package run for one streamed chat of a warm server.

    python -m benchmark.serving.request_files --null_worker [flags of the server]

Every process of the server notes the file of each function that it enters while the request runs. Operators, kernels
and models are not counted. Work that runs anyway at that moment, such as heartbeats, is counted. The launcher is not:
its processes talk to one another without it.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from benchmark.serving.server import Server
from benchmark.serving.serving_path import Load, drive

PACKAGE = Path(__file__).parents[2] / "lightserve"
NOT_COUNTED = ("common/ops/", "common/triton_kernel/", "common/cpu_kernel/", "models/")
FOLDER_VARIABLE = "LIGHTSERVE_REQUEST_FILES"  # set by this program only, for the processes of its server
TRACE = "from benchmark.serving.request_files import trace_process\n\ntrace_process()\n"
IDLE, RUNNING, OVER = 0, 1, 2  # the byte of the shared file
WARM_REQUESTS, TOKENS = 3, 16
POLL_S, DUMP_S, START_S = 0.02, 30.0, 300.0


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--api", default="chat", help="as in benchmark.serving.serving_path")
    args, flags = parser.parse_known_args(argv)
    for line in report(files_of_request(args.api, flags)):
        print(line)


def files_of_request(api: str, flags: Sequence[str]) -> dict[str, set[str]]:
    """The files relative to the package, by process."""
    with tempfile.TemporaryDirectory() as name, _traced(Path(name)) as phase:
        server = Server(list(flags))
        try:
            url = server.wait_until_ready(START_S)
            asyncio.run(drive(Load(api, 1, WARM_REQUESTS, TOKENS), url))
            phase[0] = RUNNING
            asyncio.run(drive(Load(api, 1, 1, TOKENS), url))
            phase[0] = OVER
            return _read(Path(name), [pid for pid, _ in server.processes()])
        finally:
            server.stop()


def report(files: dict[str, set[str]]) -> Iterator[str]:
    """Lines: each process with its files, then the sum."""
    for process, names in sorted(files.items()):
        yield f"{process}: {len(names)}"
        yield from (f"  {name}" for name in sorted(names))
    every = set().union(*files.values())
    yield f"{len(every)} files, {sum(len((PACKAGE / name).read_text().splitlines()) for name in every):,} lines"


@contextmanager
def _traced(folder: Path) -> Iterator[mmap.mmap]:
    """Processes that start now trace themselves. Yields what tells them when."""
    (folder / "phase").write_bytes(bytes([IDLE]))
    (folder / "sitecustomize.py").write_text(TRACE)
    added = {FOLDER_VARIABLE: str(folder), "PYTHONPATH": os.pathsep.join([str(folder), str(PACKAGE.parent)])}
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        with (folder / "phase").open("r+b") as file:
            yield mmap.mmap(file.fileno(), 1)
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def trace_process() -> None:
    """Note the files of this process, and write them when the request is over."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    with (folder / "phase").open("rb") as file:
        phase = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and phase[0] == RUNNING:
            files.add(frame.f_code.co_filename)

    def write_when_over() -> None:
        sys.setprofile(None)
        while phase[0] != OVER:
            time.sleep(POLL_S)
        process = Path("/proc/self/comm").read_text().strip()
        part = folder / f"{process}.{os.getpid()}.part"
        part.write_text("\n".join(files))
        part.rename(part.with_suffix(".files"))

    threading.setprofile(note)
    sys.setprofile(note)
    threading.Thread(target=write_when_over, daemon=True).start()


def _read(folder: Path, pids: Sequence[int]) -> dict[str, set[str]]:
    end = time.monotonic() + DUMP_S
    while missing := [pid for pid in pids if not list(folder.glob(f"*.{pid}.files"))]:
        if time.monotonic() > end:
            raise RuntimeError(f"processes {missing} did not write their files within {DUMP_S:.0f} s")
        time.sleep(POLL_S)
    paths = [path for pid in pids for path in folder.glob(f"*.{pid}.files")]
    return {path.stem: set(filter(_counts, map(_relative, path.read_text().splitlines()))) for path in paths}


def _relative(filename: str) -> str:
    return filename.removeprefix(f"{PACKAGE}/")


def _counts(name: str) -> bool:
    return not name.startswith(("/", "<", *NOT_COUNTED)) and (PACKAGE / name).is_file()


if __name__ == "__main__":
    main()
