"""Kernels run on the GPU where there is one and in Triton's interpreter where there is none."""

from __future__ import annotations

import gc
import logging
import os
import sys
import zlib
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin starve the servers under test; read by torch
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

FUZZ_EXAMPLES, FUZZ_EXAMPLES_LONG = 15, 3000
HISTORIES, HISTORIES_LONG = 50, 1000
INTERPRETED_SHARE = 12  # all of them would take minutes

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # another process tests beside this one
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # and the servers that it starts

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which nothing before this line does


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", help="run only the op tests of this backend")
    parser.addoption("--long", action="store_true", help="run the tests that take minutes too")
    parser.addoption(
        "--examples", type=int, help="random cases of each test in test/fuzz, the API's schema and histories"
    )


def pytest_configure(config: pytest.Config) -> None:
    """The profiles of test/fuzz, with few cases that are always the same or many new ones, and of the schedulers."""
    is_long = bool(config.getoption("--long"))
    count = config.getoption("--examples") or (FUZZ_EXAMPLES_LONG if is_long else FUZZ_EXAMPLES)
    settings.register_profile(
        "fuzz",
        max_examples=count,
        deadline=None,
        derandomize=not is_long,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink a message takes minutes
    )
    # Every run tries other histories. A failure prints its history, and a @reproduce_failure line that replays it.
    settings.register_profile(
        "histories",
        max_examples=HISTORIES_LONG if is_long else HISTORIES,
        deadline=None,
        derandomize=False,
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from test.shared_servers import SharedServerScheduling  # xdist is there

    return SharedServerScheduling(config, log)


def pytest_collection(session: pytest.Session) -> None:
    """Tests are made for the backends that are there when their modules are imported."""
    if backend := session.config.getoption("--backend"):
        from test.ops.packages import load_backend

        load_backend(backend)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if backend := config.getoption("--backend"):
        _keep_backend(backend, config, items)
    elif not (torch.cuda.is_available() or config.getoption("--long")):
        _sample_interpreted(config, items)
    for item in items:
        if torch.cuda.is_available() and _backend_of(item) == "triton":
            item.add_marker(pytest.mark.gpu)  # the same tests that interpret the kernels elsewhere
        elif item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an accelerator"))
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: --long runs it"))
    _put_slow_files_first(items)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    if "triton.runtime.interpreter" in sys.modules and not torch.cuda.is_available():
        from test.interpreter import speed_up

        speed_up(checks_overflow=bool(session.config.getoption("--long")))
    _freeze_what_is_collected()


def _freeze_what_is_collected() -> None:
    """Fifteen thousand tests and the modules that they import stay: no collection of garbage has to visit them.

    Tests that make many objects, such as those that parse source code, took three to six times as long.
    """
    gc.collect()
    gc.freeze()


def _put_slow_files_first(items: list[pytest.Item]) -> None:
    """A file that takes minutes and comes last would keep one process busy while the others have ended."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def _keep_backend(backend: str, config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if _backend_of(item) == backend]
    if not kept:
        known = sorted({_backend_of(item) for item in items} - {""})
        raise pytest.UsageError(f"--backend {backend}: no test runs it; there are {known}")
    config.hook.pytest_deselected(items=[item for item in items if _backend_of(item) != backend])
    items[:] = kept


def _sample_interpreted(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the cases of a kernel, keep the first and one in ``INTERPRETED_SHARE``: a GPU and --long run all of them."""
    seen: set[str] = set()
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        is_kept = (
            not _backend_of(item).startswith("triton")
            or test not in seen
            or zlib.crc32(item.nodeid.encode()) % INTERPRETED_SHARE == 0
        )
        if _backend_of(item).startswith("triton"):
            seen.add(test)
        (kept if is_kept else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


def _backend_of(item: pytest.Item) -> str:
    if item.get_closest_marker("interpreted"):
        return "triton"
    callspec = getattr(item, "callspec", None)
    backend = callspec.params.get("backend") if callspec else None
    return backend if isinstance(backend, str) else ""


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What our loggers say; they do not pass it on to the root logger, where pytest listens."""
    ours = logging.getLogger("lightserve")
    ours.addHandler(caplog.handler)
    yield caplog
    ours.removeHandler(caplog.handler)


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model of small_text.py, which nobody may change."""
    from test.small_text import save_small_model  # transformers begins here, which most tests do not need

    return save_small_model(tmp_path_factory.mktemp("small"))
