"""Typed settings: TOML files, `--set a.b=c` overrides, and errors that name the nearest key."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from scone.errors import ConfigError


class Config(BaseModel):
    """Base of all settings: frozen, unknown keys refused, attribute docstrings as descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain JSON values, defaults included."""
        return self.model_dump(mode="json")


C = TypeVar("C", bound=Config)


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The nested settings of a TOML document.

    Raises:
        ConfigError: The text is not TOML; the message names `where` and the line.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}") from error


def apply_overrides(settings: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of `settings` with each `a.b=value` applied; values are TOML, or else plain strings.

    Raises:
        ConfigError: An override has no `=`, or descends into a setting that is not a section.
    """
    result = _deep_copy(settings)
    for override in overrides:
        key, separator, text = override.partition("=")
        path = key.strip().split(".")
        if not separator or not all(path):
            raise ConfigError(f"--set {override}: expected section.key=value, as in --set count.num_fgrams=100000")
        section = result
        for depth, name in enumerate(path[:-1]):
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise ConfigError(f"--set {override}: {'.'.join(path[: depth + 1])} is a value, not a section")
        section[path[-1]] = _parse_value(text.strip())
    return result


def build_config(config_class: type[C], settings: Mapping[str, Any], where: str = "") -> C:
    """`config_class` from nested settings; `where` is the dotted section that the error messages name.

    Raises:
        ConfigError: A key is unknown or missing, or a value is not acceptable. All problems are listed.
    """
    try:
        return config_class(**settings)
    except ValidationError as error:
        problems = [_describe(config_class, problem, where) for problem in error.errors()]
        raise ConfigError("\n".join(problems)) from None


def _describe(config_class: type[BaseModel], problem: Any, where: str) -> str:
    location = ".".join(str(part) for part in (where, *problem["loc"]) if part != "")
    if problem["type"] == "extra_forbidden":
        known = _field_names_at(config_class, problem["loc"][:-1])
        nearest = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"known keys: {', '.join(sorted(known))}"
        return f"unknown setting {location}: {hint}"
    if problem["type"] == "missing":
        return f"{location} is required and was not given"
    message = problem["msg"].removeprefix("Value error, ")
    if isinstance(problem["input"], Mapping | BaseModel):
        return f"{location}: {message}" if location else message
    return f"{location}: {message} (got {problem['input']!r})"


def _field_names_at(config_class: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    current: type[BaseModel] = config_class
    for name in path:
        field = current.model_fields.get(str(name))
        annotation = field.annotation if field else None
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        nested = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not nested:
            return []
        current = nested[0]
    return list(current.model_fields)


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _deep_copy(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _deep_copy(value) if isinstance(value, Mapping) else value for key, value in settings.items()}
