"""The real default model, for tests that random weights cannot serve; fetched once a machine."""

from __future__ import annotations

import functools

from lightserve.model_files import ModelSource, resolve


@functools.cache
def smollm2() -> ModelSource:
    return resolve(None)
