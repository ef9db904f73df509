"""Draft methods by name. A new method is one file in this folder and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from common.errors import UnknownOptionError
from drafter_svc.methods.ngram import NgramMethod
from model_executor.drafting import DraftMethod


def _build_ngram(options: Mapping[str, Any]) -> DraftMethod:
    return NgramMethod(options["prompt_lookup_max"], options["prompt_lookup_min"])


_METHODS: dict[str, Callable[[Mapping[str, Any]], DraftMethod]] = {
    "ngram": _build_ngram,
}

METHOD_NAMES = tuple(_METHODS)


def build_method(name: str, options: Mapping[str, Any]) -> DraftMethod:
    """The draft method of that name.

    Args:
        name: one of `METHOD_NAMES`.
        options: fields of `DrafterConfig`; each method reads its own.

    Raises:
        UnknownOptionError: there is no such method; names the nearest one, or all.
        InvalidArgumentError: an option of the method is out of range.
    """
    if name not in _METHODS:
        raise UnknownOptionError(name, _METHODS)
    return _METHODS[name](options)
