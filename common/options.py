"""Command-line flags, a file and the environment as one configuration.

A pydantic model is the only description of the options: names, types, defaults and help come from it. A value is taken
from the first of: flag, file (`--config FILE.toml`), environment (`OUTRIDER_<FIELD>`), default.
"""

from __future__ import annotations

import argparse
import difflib
import tomllib
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from common.errors import InvalidArgumentError, UnknownOptionError
from common.logging import Logger

ENVIRONMENT_PREFIX = "OUTRIDER_"

# Flags are kept apart from other arguments of a command, so that only those that were given are seen.
_DESTINATION = "options."

ModelT = TypeVar("ModelT", bound=BaseModel)


class OptionParser(argparse.ArgumentParser):
    """Abbreviates nothing, and answers an unknown flag with the nearest one that exists."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.allow_abbrev = False

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split()[0] if "unrecognized" in message else ""
        nearest = difflib.get_close_matches(unknown.partition("=")[0], self._all_flags(), n=1)
        super().error(f"{message} (did you mean {nearest[0]}?)" if nearest else message)

    def _all_flags(self) -> list[str]:
        # The top parser reports what no command took, so the flags of all commands are candidates.
        flags = list(self._option_string_actions)
        for action in self._actions:
            choices: Any = action.choices
            if isinstance(choices, dict):
                for parser in typing.cast("dict[str, OptionParser]", choices).values():
                    flags += parser._option_string_actions
        return flags


def add_options(
    parser: argparse.ArgumentParser,
    model: type[BaseModel],
    *,
    positional: Collection[str] = (),
    exclude: Collection[str] = (),
) -> None:
    """Add `--config` and one flag for each field of `model`.

    Args:
        parser: of the command.
        model: with field docstrings (`use_attribute_docstrings=True`) or descriptions, which become the help.
        positional: fields that are given without a flag.
        exclude: fields that the command sets itself.
    """
    parser.add_argument(
        "--config", metavar="FILE.toml", help="options by field name; flags come before it, the environment after it"
    )
    for name, field in model.model_fields.items():
        if name in exclude:
            continue
        settings: dict[str, Any] = {"help": _help(field), "default": argparse.SUPPRESS}
        kind = _plain_type(field.annotation)
        if kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        elif get_origin(kind) is Literal:
            settings["choices"] = get_args(kind)
        else:
            settings["metavar"] = _metavar(kind)
        if name in positional:
            settings["metavar"] = name.upper()
            parser.add_argument(_DESTINATION + name, nargs="?", **settings)
        else:
            parser.add_argument(_flag(name), dest=_DESTINATION + name, **settings)


def resolve_options(
    model: type[ModelT], args: argparse.Namespace, environment: Mapping[str, str], logger: Logger
) -> ModelT:
    """The configuration that flags, file and environment describe together.

    Variables of the environment that no field has are logged and left alone: other programs set some, such as an
    orchestrator that announces a service of the name `outrider`.

    Raises:
        UnknownOptionError: the file has a key that does not exist.
        InvalidArgumentError: a value is out of range; names the flag, key or variable it came from.
    """
    flags = {name.removeprefix(_DESTINATION): value for name, value in vars(args).items() if "." in name}
    path = getattr(args, "config", None)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    variables = _from_environment(model, environment, logger)
    for origin, found in (("variable", variables), ("key", _from_file(model, path)), ("flag", flags)):
        for name, value in found.items():
            values[name] = value
            sources[name] = _source(origin, name, path)
    try:
        return model(**values)
    except InvalidArgumentError as error:
        name, _, rest = error.field.partition(".")
        if name in model.model_fields and name not in sources:
            sources[name] = _flag(name)
        if rest or name not in sources:
            raise
        raise InvalidArgumentError(sources[name], error.value, error.expected) from None


def log_options(logger: Logger, config: BaseModel) -> None:
    """One record with every option as it was resolved; values of type `SecretStr` show as stars."""
    logger.info("configuration", **config.model_dump(mode="json"))


def _from_file(model: type[BaseModel], path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidArgumentError("--config", path, f"a TOML file that can be read ({error})") from None
    return {_known(key, model.model_fields): value for key, value in values.items()}


def _from_environment(model: type[BaseModel], environment: Mapping[str, str], logger: Logger) -> dict[str, str]:
    found: dict[str, str] = {}
    for variable, value in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name in model.model_fields:
            found[name] = value
        else:
            nearest = difflib.get_close_matches(name, model.model_fields, n=1)
            logger.warning(
                "environment variable is no option",
                variable=variable,
                nearest=(ENVIRONMENT_PREFIX + nearest[0].upper()) if nearest else None,
            )
    return found


def _known(key: str, names: Iterable[str]) -> str:
    name = key.replace("-", "_")
    if name not in names:
        raise UnknownOptionError(key, names)
    return name


def _source(origin: str, name: str, path: str | None) -> str:
    if origin == "flag":
        return _flag(name)
    return ENVIRONMENT_PREFIX + name.upper() if origin == "variable" else f"{path}: {name}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _help(field: FieldInfo) -> str:
    text = " ".join((field.description or "").split()).rstrip(".").replace("%", "%%")
    if field.default is None or field.default is PydanticUndefined:
        return text
    default = field.default
    shown = ("on" if default else "off") if isinstance(default, bool) else str(default) or "empty"
    return f"{text}{'; ' if text else ''}default: {shown}"


def _plain_type(annotation: Any) -> Any:
    """The type behind `Annotated` and `| None`."""
    if get_origin(annotation) in (typing.Union, types.UnionType):
        (annotation,) = [part for part in get_args(annotation) if part is not type(None)][:1]
    if get_origin(annotation) is typing.Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def _metavar(kind: Any) -> str:
    return {int: "N", float: "X", Path: "PATH"}.get(kind, "VALUE")
