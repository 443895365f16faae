"""Choices that replace others in a configuration: the new class begins with its own defaults.

Where a file or an option names another class than before, jsonargparse keeps every argument of the
old one that the new one knows, too. So a configuration is put before it that names the new class
with all its defaults. The class of the model and of the data keep what was said of the old one.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc import ErrorDuringImport, locate
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from lightning.pytorch import LightningDataModule

from lit_rl.algorithms import RLModule
from lit_rl.config_errors import parameters, subclasses

ROOTS = {"model": RLModule, "data": LightningDataModule}
Place = tuple[str, ...]  # such as ("model", "advantage", "baseline")


def with_own_defaults(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a subcommand with a configuration before each that replaces a class.

    Args:
        arguments: options and their values, in the order in which they hold. What cannot be read
            stays as it is: the parser will say so.
    """
    choices = Choices()
    result: list[str] = []
    for item in _items(arguments):
        defaults = choices.replaced_by(_named_classes(item))
        result += ["--config", json.dumps(defaults)] * bool(defaults)
        result += item
    return result


class Choices:
    """The classes of a configuration, as it is read part by part."""

    def __init__(self) -> None:
        self._names: dict[Place, str] = {}
        self._classes: dict[Place, type] = {}

    def replaced_by(self, named: Iterator[tuple[Place, str]]) -> dict[str, Any]:
        """Take the classes in that a part names; return the defaults of those that replace others.

        Args:
            named: places and names, an outer place before those in it.
        """
        defaults: dict[str, Any] = {}
        for place, name in named:
            kind = _class_of(name, self._bases(place))
            if kind is None:
                continue
            before = self._class_at(place)
            self._classes[place], self._names[place] = kind, name
            if before not in (None, kind) and len(place) > 1:
                inner = [other for other in self._classes if other[:-1][: len(place)] == place]
                for other in inner:
                    del self._classes[other], self._names[other]
                self._set_defaults(defaults, place)
        return defaults

    def _bases(self, place: Place) -> list[type]:
        """Return the classes of which a choice may be a subclass; none where it is no choice."""
        if len(place) == 1:
            return [ROOTS[place[0]]]
        parameter = self._parameters(place[:-1]).get(place[-1])
        annotation = None if parameter is None else parameter.annotation
        is_union = get_origin(annotation) in (Union, UnionType)
        kinds = get_args(annotation) if is_union else (annotation,)
        return [kind for kind in kinds if isinstance(kind, type) and kind.__module__ != "builtins"]

    def _class_at(self, place: Place) -> type | None:
        """Return the class that stands at a place: the one that was named, or a default's."""
        if place in self._classes or len(place) == 1:
            return self._classes.get(place)
        parameter = self._parameters(place[:-1]).get(place[-1])
        default = None if parameter is None else parameter.default
        return type(default) if isinstance(default, tuple(self._bases(place))) else None

    def _parameters(self, place: Place) -> dict[str, Any]:
        kind = self._class_at(place)
        return {} if kind is None else parameters(kind)

    def _set_defaults(self, tree: dict[str, Any], place: Place) -> None:
        for length, name in enumerate(place, start=1):
            kind: Any = self._class_at(place[:length])
            tree = tree.setdefault(name, {})
            full = f"{kind.__module__}.{kind.__qualname__}"
            tree["class_path"] = self._names.get(place[:length], full)
            tree = tree.setdefault("init_args", {})
        tree |= {
            argument: parameter.default
            for argument, parameter in self._parameters(place).items()
            if _is_plain(parameter.default)
        }


def _items(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Yield each option with its values."""
    item: list[str] = []
    for argument in arguments:
        if item and argument.startswith("-") and not argument[1:2].isdigit():
            yield item
            item = []
        item.append(argument)
    if item:
        yield item


def _named_classes(item: Sequence[str]) -> Iterator[tuple[Place, str]]:
    """Yield what an option says that might be a class, an outer place before those in it."""
    key, is_joined, value = item[0].partition("=")
    value = value if is_joined else " ".join(item[1:])
    if key in ("--config", "-c"):
        content = _content(value)
        for root in ROOTS:
            if isinstance(content, dict) and root in content:
                yield from _named_in(content[root], (root,))
        return
    names = [name for name in key.lstrip("-").split(".") if name != "init_args"]
    if names[-1] == "class_path":
        names.pop()
    if names and names[0] in ROOTS:
        yield from _named_in(_loaded(value) if value.startswith("{") else value, tuple(names))


def _named_in(value: Any, place: Place) -> Iterator[tuple[Place, str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        if isinstance(name := value.get("class_path"), str):
            yield place, name
        arguments = value.get("init_args") if value.keys() & {"class_path", "init_args"} else value
        for key, inner in (arguments or {}).items():
            yield from _named_in(inner, (*place, str(key)))


def _content(config: str) -> Any:
    """Return what is in a file, or in a configuration that is given itself."""
    path = Path(config)
    try:
        return _loaded(path.read_text(encoding="utf-8") if path.is_file() else config)
    except (OSError, UnicodeDecodeError):
        return None


def _loaded(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None


def _class_of(name: str, bases: list[type]) -> type | None:
    """Return the subclass of one of `bases` that a name means, a path or the last part of one."""
    if "." not in name:
        known = [kind for base in bases for kind in (base, *subclasses(base))]
        return next((kind for kind in known if kind.__name__ == name), None)
    try:
        found = locate(name) if bases else None
    except ErrorDuringImport:
        return None
    return found if isinstance(found, type) and issubclass(found, tuple(bases)) else None


def _is_plain(value: Any) -> bool:
    """Whether a default can be written in a configuration; not that of a required argument."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int)
