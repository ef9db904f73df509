"""pydantic's complaints as Outrider's errors: the field, the value and the limit."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ValidationError

from common.errors import InvalidArgumentError, OutriderError, UnknownOptionError


def to_outrider_error(error: ValidationError, model: type[BaseModel], values: dict[str, Any]) -> OutriderError:
    """The first complaint of `error`, raised while `model(**values)` was made."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidArgumentError):
        return cause
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return UnknownOptionError(field, model.model_fields)
    if first["type"] == "missing":
        return InvalidArgumentError(field, None, "a value")
    expected = re.sub(r"^(Input should be |\w+ should have |Value error, )", "", first["msg"])
    return InvalidArgumentError(field, first["input"], expected)
