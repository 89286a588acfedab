"""A TOML file and `--set` overrides -> Config, and back. Unknown keys and wrong types are errors that name the nearest right one."""

import difflib
import inspect
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from packhorse.errors import ConfigError
from packhorse.train.config import Config


def load_config(path: Path, overrides: Iterable[str] = ()) -> Config:
    """Reads the TOML file `path`, then applies `overrides` such as "optimizer.lr=3e-4" in order.

    The value of an override is a TOML value. What is not one, or stands for a key that takes strings only, is a string as it is:
    run.dir=out/a and run.dir=2026-01-01 need no quotes.
    Raises ConfigError if the file cannot be read or a key or value is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}; give the path of a TOML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); give a TOML file") from error
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}; correct that line (strings need quotes, true is lower case)") from error
    for override in overrides:
        section, key, value = _parse_override(override)
        _require_table(section, given.setdefault(section, {}))[key] = value
    return config_from_dict(given)


def config_from_dict(given: Mapping[str, Any]) -> Config:
    """Section -> key -> value  ->  Config; what is not given keeps its default. Raises ConfigError naming the key."""
    sections = get_type_hints(Config)
    resolved = {}
    for section, values in given.items():
        if section not in sections:
            raise ConfigError(f"unknown section [{section}]{nearest(section, sections)}; the sections are {', '.join(sections)}")
        kind = sections[section]
        types, known = get_type_hints(kind), {f.name: f for f in fields(kind)}
        for key in _require_table(section, values):
            if key not in known:
                raise ConfigError(f"unknown key {section}.{key}{nearest(key, known)}; [{section}] has {', '.join(known)}")
        resolved[section] = kind(**{key: _checked(f"{section}.{key}", value, types[key], known[key]) for key, value in values.items()})
    return Config(**resolved)


def format_config(config: Config, explained: bool = False) -> str:
    """The whole configuration as TOML that load_config reads back to an equal Config; keys without a value stand as comments.

    explained: each section begins with what it says of itself, as comments.
    """
    lines, kinds = [], get_type_hints(Config)
    for section, values in config.to_dict().items():
        if explained:
            lines += [f"# {line}".rstrip() for line in inspect.cleandoc(kinds[section].__doc__ or "").splitlines()]
        lines.append(f"[{section}]")
        lines += [f"# {key} is not set" if value is None else f"{key} = {_toml(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def differing_keys(one: Config, other: Config) -> list[str]:
    """Names such as "optimizer.lr" of the settings in which two configurations differ."""
    first, second = one.to_dict(), other.to_dict()
    return [f"{section}.{key}" for section in first for key in first[section] if first[section][key] != second[section][key]]


def _parse_override(override: str) -> tuple[str, str, Any]:
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"cannot read --set {override}; expected SECTION.KEY=VALUE, for example --set optimizer.lr=3e-4")
    section, key, text = section.strip(), key.strip(), text.strip()
    try:
        read = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return section, key, text
    # A line break in the text could have smuggled in a second key.
    value = read["value"] if len(read) == 1 else text
    kind = get_type_hints(get_type_hints(Config).get(section, Config)).get(key)
    return section, key, text if kind is str and not isinstance(value, str) else value


def _require_table(section: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ConfigError(f"{section} is {values!r}, expected a section; write [{section}] and its keys below it")
    return values


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: which known one may be meant, if any comes near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _checked(name: str, value: Any, kind: Any, key: Field) -> Any:
    """`value` as the type `kind`, if it is one and in the key's range."""
    converted = _converted(value, kind)
    if converted is None:
        hint = f'; write "{value}" in quotes' if kind is str else ""
        if get_origin(kind) is Literal and isinstance(value, str):
            hint = nearest(value, map(str, get_args(kind)))
        raise ConfigError(f"{name} is {value!r} ({_type_name(type(value))}), expected {_type_name(kind)}{hint}")
    least, below = key.metadata.get("least"), key.metadata.get("below")
    for number in converted if isinstance(converted, tuple) else (converted,):
        if isinstance(number, str | bool | dict):
            continue
        if not math.isfinite(number) or (least is not None and number < least) or (below is not None and number >= below):
            bounds = " and ".join(["finite"] + [f"at least {least}"] * (least is not None) + [f"below {below}"] * (below is not None))
            raise ConfigError(f"{name} is {number!r}, expected a number that is {bounds}")
    return converted


def _converted(value: Any, kind: Any) -> Any:
    """The value, with integers widened where a float is due; None if it has another type."""
    if isinstance(kind, UnionType):
        options = [option for option in get_args(kind) if option is not NoneType]
        return next((found for option in options if (found := _converted(value, option)) is not None), None)
    if get_origin(kind) is Literal:
        return value if any(type(value) is type(option) and value == option for option in get_args(kind)) else None
    if get_origin(kind) is tuple:
        if not isinstance(value, list) or len(value) != len(get_args(kind)):
            return None
        parts = tuple(_converted(part, option) for part, option in zip(value, get_args(kind), strict=True))
        return None if None in parts else parts
    if get_origin(kind) is dict:
        return value if isinstance(value, dict) else None
    if kind is float and type(value) is int:
        return float(value)
    return value if type(value) is kind else None


def _type_name(kind: Any) -> str:
    if isinstance(kind, UnionType):
        return " or ".join(_type_name(option) for option in get_args(kind) if option is not NoneType)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(json.dumps(option) for option in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} numbers"
    if get_origin(kind) is dict:
        kind = dict
    names = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", list: "a list", dict: "a table"}
    return names.get(kind, kind.__name__)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON escapes are TOML escapes; DEL alone is legal in JSON and not in TOML.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    return repr(value)
