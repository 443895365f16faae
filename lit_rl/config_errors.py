"""Errors of a configuration, in one line that begins with the key that is wrong."""

import difflib
import inspect
import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from pydoc import locate
from typing import Any

UNKNOWN_KEY = (
    r"unrecognized arguments: -*([\w.]+)",
    r"does not accept option '([\w.]+)'",
    r"Option '([\w.]+)' is not accepted",
)
# Lines of a message that say where it comes from, or what else might have been meant.
FRAME = "$|Parser key .*:$|.*Problem with given|Does not validate|Subtypes:|Expected a .*NoneType"
FRAME += "|Expected a path but"


def explain(message: str, known: Iterable[str]) -> str:
    """Return a line that begins with the wrong key of a parser's message and says what is wrong.

    Args:
        message: what jsonargparse says.
        known: the keys of the parser.

    Example:
        >>> explain("unrecognized arguments: --trainr.max_epochs=3", ["trainer.max_epochs"])
        'trainr.max_epochs is not a key; the nearest is trainer.max_epochs'
    """
    if wrong := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", message):
        module, name = wrong.groups()
        near = _near(name, dir(locate(module)))
        return f"{module}.{name} is not there" + (f"; the nearest is {module}.{near}" * bool(near))
    for pattern in UNKNOWN_KEY:
        if wrong := re.search(pattern, message):
            return _unknown_key(message[: wrong.start()], wrong.group(1), known)
    path = ".".join(re.findall(r'Parser key "([\w.]+)"', message))
    if wrong := re.search(r"Expected a dot import path string: (\S+)", message):
        return f"{path}: {_no_class(wrong.group(1), _annotation(message) or _root(path))}"
    return _refused_value(message, path)


def _refused_value(message: str, path: str) -> str:
    """Return the path of the key whose value was refused, and the innermost reason."""
    lines = [line.strip(" -") for line in message.split("Errors:")[-1].strip().splitlines()]
    # What was given is a class, not the name that might have stood in its place.
    frame = FRAME + "|Expected a <class 'str'>$" * ("Problem with given class_path" in message)
    reason = next((line for line in lines if line and not re.match(frame, line)), message)
    reason = re.sub(r'^Parser key "[\w.]+": |^Call to compute_fn .* failed: ', "", reason)
    if not reason.strip():
        return message
    classes = re.findall(r"Problem with given class_path '([\w.]+)'", message.partition(reason)[0])
    if classes and (missing := re.match("the following arguments are required: (.*)", reason)):
        reason = f"{classes[-1]} needs {missing.group(1)}"
    return f"{path}: {reason}" if path else reason


def _no_class(name: str, kind: Any) -> str:
    """Return what is wrong with a name that is none of a subclass of `kind`."""
    known = _names(kind)
    # A class of a wider kind, such as an estimator that reads no values for one that does.
    bases = kind.__mro__[1:-2] if inspect.isclass(kind) else ()
    if any(name in _names(base) for base in bases):
        return f"{name} is no {kind.__name__}, such as {' or '.join(known[:3])}"
    near = _near(name, known)
    return f"there is no class {name} for it" + f"; the nearest is {near}" * bool(near)


def _unknown_key(context: str, key: str, known: Iterable[str]) -> str:
    classes = re.findall(r"Problem with given class_path '([\w.]+)'", context)
    if not classes:
        near = _near_key(key, list(known))
        return f"{key} is not a key" + f"; the nearest is {near}" * bool(near)
    # The key belongs to the last class, or to an argument of it, which is named after the class.
    below = re.findall(r'Parser key "([\w.]+)"', context.rpartition("class_path")[2])
    *inner, last = [*".".join(below).split(".")] * bool(below) + key.split(".")
    kinds = _argument_types(classes[-1])
    if not inner:
        near, where = _near(last, kinds), f"of {classes[-1]}"
    else:
        kind = kinds.get(inner[0])
        options = [f.name for f in fields(kind)] if is_dataclass(kind) else []
        near, where = _near(last, options), f"of {'.'.join(inner)}"
        if inner[0] not in kinds:
            last, near, where = key, _near(inner[0], kinds), f"of {classes[-1]}"
    return f"{last} is not a key {where}" + f"; the nearest is {near}" * bool(near)


def _near_key(key: str, known: list[str]) -> str:
    """Return the nearest key, or the key with its first part mended."""
    head, _, rest = key.partition(".")
    heads = {name.partition(".")[0] for name in known}
    if rest and head not in heads and (near := _near(head, heads)):
        whole = f"{near}.{rest}"
        return _near(whole, known) or whole
    return _near(key, known)


def _annotation(message: str) -> Any:
    """Return the type of the innermost argument that a message names, if a class takes it."""
    classes = re.findall(r"Problem with given class_path '([\w.]+)'", message)
    keys = re.findall(r'Parser key "([\w.]+)"', message)
    return _argument_types(classes[-1]).get(keys[-1]) if classes and keys else None


def _root(path: str) -> Any:
    return locate("lit_rl.algorithms.RLModule") if path == "model" else None


def _names(kind: Any) -> list[str]:
    return [found.__name__ for found in subclasses(kind)] if inspect.isclass(kind) else []


def _argument_types(class_path: str) -> dict[str, Any]:
    kind: Any = locate(class_path)
    return {name: parameter.annotation for name, parameter in parameters(kind).items()}


def subclasses(kind: type) -> list[type]:
    """Return all subclasses of a class that are imported."""
    direct: list[type] = kind.__subclasses__()
    return [found for sub in direct for found in (sub, *subclasses(sub))]


def parameters(kind: type) -> dict[str, inspect.Parameter]:
    """Return a class's arguments, those taken through `**kwargs` included."""
    constructors = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)]
    return {
        name: parameter
        for init in reversed(constructors)
        for name, parameter in inspect.signature(init).parameters.items()
        if name != "self"
    }


def _near(name: str, options: Iterable[str]) -> str:
    return next(iter(difflib.get_close_matches(name, list(options), n=1, cutoff=0.6)), "")
