from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What our loggers say; they do not pass it on to the root logger, where pytest listens."""
    ours = logging.getLogger("lightserve")
    ours.addHandler(caplog.handler)
    yield caplog
    ours.removeHandler(caplog.handler)
