"""Every message between processes survives encoding; invalid bytes raise MessageError and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given, reject, strategies as st
from msgspec import inspect

from lightserve.errors import InvalidRequestError
from lightserve.ipc.channel import MessageError, make_decoder
from lightserve.ipc.codec import encode, make_decode
from lightserve.messages.control import FromChild, ToChild
from lightserve.messages.media import FromEncoder, ToEncoder
from lightserve.messages.output import ToDetokenization, ToHttpserver
from lightserve.messages.request import ToRouter
from lightserve.messages.step import Step, TokenOut
from test.fuzz.profile import FUZZ

ON_THE_WIRE: dict[str, Any] = {
    "ToRouter": ToRouter,
    "FromEncoder": FromEncoder,
    "ToEncoder": ToEncoder,
    "ToDetokenization": ToDetokenization,
    "ToHttpserver": ToHttpserver,
    "Step": Step,
    "list[TokenOut]": list[TokenOut],
}
AS_LINES: dict[str, Any] = {"ToChild": ToChild, "FromChild": FromChild}
MOST = 2  # items of a list: messages are wide enough
_open_structs: list[type] = []  # whose fields are being looked at
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def values_of(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Any value of a msgspec type."""
    return _STRATEGIES[type(kind)](kind)


def _integers(kind: Any) -> st.SearchStrategy[int]:
    low = kind.ge if kind.ge is not None else -(2**63)
    return st.integers(low, kind.le if kind.le is not None else 2**63 - 1)


def _floats(kind: Any) -> st.SearchStrategy[float]:
    low = kind.ge if kind.ge is not None else kind.gt
    is_open = kind.gt is not None
    return st.floats(low, kind.le, allow_nan=False, allow_infinity=False, exclude_min=is_open)


def _texts(kind: Any) -> st.SearchStrategy[str]:
    return TEXT.filter(lambda text: len(text) >= (kind.min_length or 0))


def _lists(kind: Any) -> st.SearchStrategy[list[Any]]:
    items = values_of(kind.item_type)
    return st.lists(items, min_size=kind.min_length or 0, max_size=0 if items.is_empty else MOST)


def _tables(kind: Any) -> st.SearchStrategy[dict[Any, Any]]:
    return st.dictionaries(values_of(kind.key_type), values_of(kind.value_type), max_size=MOST)


def _arrays(array_type: Any) -> st.SearchStrategy[Any]:
    limits = np.iinfo(get_args(get_args(array_type)[1])[0])
    numbers = st.lists(st.integers(int(limits.min), int(limits.max)), max_size=MOST)
    return numbers.map(partial(np.array, dtype=limits.dtype))


def _structs(kind: Any) -> st.SearchStrategy[Any]:
    """A struct may have lists of its own kind. Those within them are empty."""
    if _open_structs.count(kind.cls) > 1:
        return st.nothing()
    _open_structs.append(kind.cls)
    try:
        return _struct(kind)
    finally:
        _open_structs.pop()


def _struct(kind: Any) -> st.SearchStrategy[Any]:
    types = get_type_hints(kind.cls)
    fields = {field.name: _field(field.type, types[field.name]) for field in kind.fields}
    return st.fixed_dictionaries(fields).map(lambda values: _build(kind.cls, values))


def _field(kind: inspect.Type, hint: Any) -> st.SearchStrategy[Any]:
    """msgspec does not know what numbers an array has."""
    if isinstance(kind, inspect.CustomType):
        return _arrays(hint)
    if isinstance(kind, inspect.VarTupleType | inspect.ListType) and isinstance(kind.item_type, inspect.CustomType):
        sequence = tuple if isinstance(kind, inspect.VarTupleType) else list
        return st.lists(_arrays(get_args(hint)[0]), max_size=MOST).map(sequence)
    return values_of(kind)


def _build(cls: Callable[..., Any], values: dict[str, Any]) -> Any:
    try:
        return cls(**values)
    except InvalidRequestError:  # fields that exclude each other
        reject()


_STRATEGIES: dict[type, Callable[[Any], st.SearchStrategy[Any]]] = {
    inspect.IntType: _integers,
    inspect.FloatType: _floats,
    inspect.StrType: _texts,
    inspect.BytesType: lambda kind: st.binary(max_size=20),
    inspect.BoolType: lambda kind: st.booleans(),
    inspect.NoneType: lambda kind: st.none(),
    inspect.EnumType: lambda kind: st.sampled_from(kind.cls),
    inspect.LiteralType: lambda kind: st.sampled_from(kind.values),
    inspect.ListType: _lists,
    inspect.VarTupleType: lambda kind: _lists(kind).map(tuple),
    inspect.TupleType: lambda kind: st.tuples(*map(values_of, kind.item_types)),
    inspect.DictType: _tables,
    inspect.UnionType: lambda kind: st.one_of(*map(values_of, kind.types)),
    inspect.StructType: _structs,
    inspect.Metadata: lambda kind: values_of(kind.type),
}


@pytest.mark.parametrize("name", ON_THE_WIRE)
@FUZZ
@given(data=st.data())
def test_a_message_survives_encoding(name: str, data: st.DataObject) -> None:
    kind = ON_THE_WIRE[name]
    message = data.draw(values_of(inspect.type_info(kind)))

    raw = encode(message)  # messages with arrays cannot be compared
    assert encode(make_decode(kind)(raw)) == raw


@pytest.mark.parametrize("name", AS_LINES)
@FUZZ
@given(data=st.data())
def test_a_control_message_survives_encoding_in_one_line(name: str, data: st.DataObject) -> None:
    kind = AS_LINES[name]
    message = data.draw(values_of(inspect.type_info(kind)))

    line = msgspec.json.encode(message)

    assert b"\n" not in line
    assert msgspec.json.decode(line, type=kind) == message


@pytest.mark.parametrize("name", ON_THE_WIRE)
@FUZZ
@given(data=st.data())
def test_damaged_bytes_are_decoded_or_refused(name: str, data: st.DataObject) -> None:
    raw = bytearray(encode(data.draw(values_of(inspect.type_info(ON_THE_WIRE[name])))))
    for at in data.draw(st.lists(st.integers(0, len(raw) - 1), max_size=4)):
        raw[at] = data.draw(st.integers(0, 255))

    with contextlib.suppress(MessageError):
        make_decoder(ON_THE_WIRE[name])(bytes(raw[: data.draw(st.integers(0, len(raw)))]))


@pytest.mark.parametrize("name", ON_THE_WIRE)
@FUZZ
@given(raw=st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(name: str, raw: bytes) -> None:
    with contextlib.suppress(MessageError):
        make_decoder(ON_THE_WIRE[name])(raw)


@pytest.mark.parametrize("name", AS_LINES)
@FUZZ
@given(raw=st.binary(max_size=200))
def test_any_line_is_decoded_or_refused(name: str, raw: bytes) -> None:
    with contextlib.suppress(ValueError):  # what the launcher and its children expect
        msgspec.json.decode(raw, type=AS_LINES[name])
