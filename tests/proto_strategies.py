"""Hypothesis strategies for messages of any proto: every field there or not, in range and far out of it."""

from __future__ import annotations

import struct
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

_MAX_DEPTH = 3
_SIGNED = {FieldDescriptor.CPPTYPE_INT32: 31, FieldDescriptor.CPPTYPE_INT64: 63}
_UNSIGNED = {FieldDescriptor.CPPTYPE_UINT32: 32, FieldDescriptor.CPPTYPE_UINT64: 64}


def signed(bits: int) -> st.SearchStrategy[int]:
    """Small numbers, and those at the ends of what `bits` + a sign hold."""
    return st.integers(-2, 9) | st.sampled_from([-(2**bits), -(2**bits) + 1, 2**bits - 1, 2 ** (bits - 1)])


def unsigned(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, 9) | st.sampled_from([2**bits - 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1])


def floats() -> st.SearchStrategy[float]:
    """Those of 32 bits, with infinities, NaN and denormals."""
    special = [0.0, 1.0, -1.0, 1e-45, 3e38, float("inf"), float("-inf"), float("nan")]
    return st.sampled_from(special) | st.floats(width=32)


def texts(max_size: int = 12) -> st.SearchStrategy[str]:
    """No lone surrogates, which no proto carries."""
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=max_size)


def columns(code: str, numbers: st.SearchStrategy[Any], max_size: int = 4) -> st.SearchStrategy[bytes]:
    """A packed column of numbers of `struct`'s code, and now and then some bytes too many."""
    packed = st.lists(numbers, max_size=max_size).map(lambda values: struct.pack(f"<{len(values)}{code}", *values))
    return packed | st.builds(bytes.__add__, packed, st.binary(max_size=3))


def messages(descriptor: Any, depth: int = 0) -> st.SearchStrategy[Message]:
    """Messages of one type; only a third of all fields are set, so that one bad field does not hide another."""
    fields = [field for field in descriptor.fields if depth < _MAX_DEPTH or field.message_type is None]
    message_class = GetMessageClass(descriptor)
    if not fields:
        return st.builds(message_class)

    @st.composite
    def build(draw: st.DrawFn) -> Message:
        message = message_class()
        for index in draw(st.lists(st.integers(0, len(fields) - 1), max_size=max(2, len(fields) // 3), unique=True)):
            _set(draw, message, fields[index], depth)
        return message

    return build()


def damaged(data: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Bytes of a message, cut, with some of another kind put in, or changed in one place."""

    @st.composite
    def build(draw: st.DrawFn) -> bytes:
        whole = draw(data)
        place = draw(st.integers(0, len(whole)))
        how = draw(st.sampled_from(["cut", "insert", "change"]))
        if how == "cut":
            return whole[:place]
        noise = draw(st.binary(min_size=1, max_size=8))
        return whole[:place] + noise + whole[place + (len(noise) if how == "change" else 0) :]

    return build()


def _set(draw: st.DrawFn, message: Any, field: FieldDescriptor, depth: int) -> None:
    if not field.is_repeated:
        value = draw(_values(field, depth))
        if field.message_type is None:
            setattr(message, field.name, value)
        else:
            getattr(message, field.name).CopyFrom(value)
        return
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entries = getattr(message, field.name)
        key_field, value_field = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        for _ in range(draw(st.integers(0, 3))):
            key, value = draw(_values(key_field, depth)), draw(_values(value_field, depth))
            if value_field.message_type is None:
                entries[key] = value
            else:
                entries[key].CopyFrom(value)
        return
    getattr(message, field.name).extend(draw(st.lists(_values(field, depth), max_size=3)))


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if field.message_type is not None:
        return messages(field.message_type, depth + 1)
    if kind in _SIGNED:
        return signed(_SIGNED[kind])
    if kind in _UNSIGNED:
        return unsigned(_UNSIGNED[kind])
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return floats()
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return st.integers(0, 5)
    return st.binary(max_size=12) if field.type == FieldDescriptor.TYPE_BYTES else texts()
