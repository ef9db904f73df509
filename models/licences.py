"""Which installed packages are under a permissive licence, judged from their own metadata."""

import re
from importlib.metadata import Distribution

# SPDX identifiers; a licence that is not here counts as not permissive.
_PERMISSIVE_SPDX = frozenset(
    """0BSD Apache-2.0 BSD-2-Clause BSD-3-Clause BSL-1.0 CC0-1.0 CNRI-Python HPND ISC MIT MIT-0 MIT-CMU NCSA
    PSF-2.0 Python-2.0 Unlicense Zlib""".lower().split()
)
_PERMISSIVE_WORDS = re.compile(
    r"\b(mit|bsd|apache|isc|psf|python software foundation|unlicense|zlib|hpnd|0bsd|cc0)\b", re.IGNORECASE
)
_RESTRICTED_WORDS = re.compile(
    r"gpl|mozilla|\bmpl|eclipse|proprietary|commercial|nvidia|cc[- ]by|creative commons attribution|other/",
    re.IGNORECASE,
)
# The text of a `License` field longer than this is a whole licence, which words alone do not decide.
_MAX_LICENCE_NAME = 100


def permissive_licence(distribution: Distribution) -> str | None:
    """The package's licence as its metadata names it, or None where it is not permissive or not stated.

    The SPDX expression decides if there is one, else the licence classifiers, else a short `License` field.
    """
    metadata = distribution.metadata
    expression = _first(metadata.get_all("License-Expression"))
    if expression:
        return expression if spdx_is_permissive(expression) else None
    classifiers = [
        value.split("::")[-1].strip() for value in metadata.get_all("Classifier") or [] if value.startswith("License")
    ]
    classifiers = [name for name in classifiers if name != "OSI Approved"]
    stated = classifiers or [_first(metadata.get_all("License"))]
    for name in stated:
        if not name or len(name) > _MAX_LICENCE_NAME:
            return None
        if _RESTRICTED_WORDS.search(name) or not _PERMISSIVE_WORDS.search(name):
            return None
    return ", ".join(stated)


def spdx_is_permissive(expression: str) -> bool:
    """Whether the licence can be taken as a permissive one: every part of an AND, at least one part of an OR."""
    tokens = re.findall(r"\(|\)|[^\s()]+", expression)
    position = 0

    def peek() -> str:
        return tokens[position].lower() if position < len(tokens) else ""

    def advance() -> str:
        nonlocal position
        token = peek()
        position += 1
        return token

    def atom() -> bool:
        token = advance()
        if token == "(":
            inside = either()
            advance()
            return inside
        if peek() == "with":  # an exception only adds rights
            advance()
            advance()
        return token in _PERMISSIVE_SPDX

    def both() -> bool:
        value = atom()
        while peek() == "and":
            advance()
            value = atom() and value
        return value

    def either() -> bool:
        value = both()
        while peek() == "or":
            advance()
            value = both() or value
        return value

    result = either()
    return result and position == len(tokens)


def _first(values: list[str] | None) -> str:
    return values[0].strip() if values else ""
