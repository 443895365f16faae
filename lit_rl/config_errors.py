"""Errors of a configuration, in one line that begins with the key that is wrong."""

import difflib
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from pydoc import locate
from typing import Any, get_args, get_origin

UNKNOWN_KEY = (
    r"unrecognized arguments: -*([\w.]+)",
    r"does not accept option '([\w.]+)'",
    r"Option '([\w.]+)' is not accepted",
)
# Lines of a message that say where it comes from, or what else might have been meant.
FRAME = "$|Parser key .*:$|.*Problem with given|Does not validate|Subtypes:|Expected a .*NoneType"
FRAME += "|Expected a path but"
# What a message says of an argument that is a function, or a class that is called later.
FUNCTION_TYPE = r"Type \S*Callable\[[^\n]*\] expects a function or a callable class: "
CLASS_IN_ITS_PLACE = rf"{FUNCTION_TYPE}((?:.|\n)*?)\. Got value: Namespace\(class_path='(.+?)'.*"
# What a message says of a callback that is read as a plain one, after it was read as what it is.
NO_CALLBACK = r"(?<=\n) *- Problem with given class_path 'lightning.Callback':(?:.|\n)*"
NUMBER = r"Expected a <class '(?:int|float|bool)'>"
ROOTS = {
    "model": "lit_rl.algorithms.RLModule",
    "data": "lightning.pytorch.LightningDataModule",
    "trainer.callbacks": "lightning.pytorch.Callback",
}
MOST_NAMES = 30
"""Names that are listed, at most."""


def explain(message: str, known: Iterable[str]) -> str:
    """Return a line that begins with the wrong key of a parser's message and says what is wrong.

    Args:
        message: what jsonargparse says.
        known: the keys of the parser.

    Example:
        >>> explain("unrecognized arguments: --trainr.max_epochs=3", ["trainer.max_epochs"])
        'trainr.max_epochs is not a key; the nearest is trainer.max_epochs'
    """
    message = re.sub(CLASS_IN_ITS_PLACE, r"Problem with given class_path '\2':\n\1", message)
    message = re.sub(f"{FUNCTION_TYPE}|{NO_CALLBACK}", "", message)
    path = ".".join(re.findall(r'Parser key "([\w.]+)"', message))
    where = f"{path}: " if path else ""
    if wrong := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", message):
        return f"{where}{_not_in_module(*wrong.groups())}"
    for pattern in UNKNOWN_KEY:
        if wrong := re.search(pattern, message):
            return _unknown_key(message[: wrong.start()], wrong.group(1), known)
    kind = _annotation(message) or locate(ROOTS.get(path, ""))
    is_function = get_origin(kind) is Callable and not _names(kind)
    example = "; an example is my_module.my_function" * is_function
    last = message.rpartition("Parser key ")[2]
    wrong = re.search(r"Expected a dot import path string: (\S+)", last)
    if wrong and is_function:
        return f"{where}{wrong.group(1)} does not name a function{example}"
    if wrong and not re.search(NUMBER, last):
        return f"{where}{_no_class(wrong.group(1), kind)}"
    return _refused_value(message, path) + example


def details(message: str) -> list[str]:
    """Return the lines to print below the line of `explain`: none where it says what is wrong.

    Args:
        message: what jsonargparse says, or whoever refused a setting.
    """
    lines = message.strip().splitlines()
    frames = ("Parser key ", "Subtypes: ", "Errors:", *UNKNOWN_KEY)
    is_explained = any(re.search(frame, message) for frame in frames)
    return [] if is_explained or len(lines) == 1 else [line[:200] for line in lines]


def _not_in_module(module: str, name: str) -> str:
    found = locate(module)
    near = _near(name, dir(found))
    if near:
        return f"{module}.{name} is not there; the nearest is {module}.{near}"
    own = [
        other
        for other, value in vars(found).items()
        if getattr(value, "__module__", None) == module and not other.startswith("_")
    ]
    return f"{module}.{name} is not there" + f"; {module} has {_listed(own)}" * bool(own)


def _listed(names: Iterable[str]) -> str:
    """Return names in the order of the alphabet, up to `MOST_NAMES` of them."""
    every = sorted(names)
    return ", ".join(every[:MOST_NAMES]) + ", ..." * (len(every) > MOST_NAMES)


def _refused_value(message: str, path: str) -> str:
    """Return the path of the key whose value was refused, and the innermost reason."""
    lines = [line.strip(" -") for line in message.split("Errors:")[-1].strip().splitlines()]
    # What was given is a class, not the name that might have stood in its place.
    frame = FRAME + "|Expected a <class 'str'>$" * ("Problem with given class_path" in message)
    reason = next((line for line in lines if line and not re.match(frame, line)), message)
    reason = re.sub(r'^Parser key "[\w.]+": |^Call to compute_fn .* failed: ', "", reason)
    if not reason.strip():
        return message
    if re.match(f"{NUMBER}$", reason):
        kinds = dict.fromkeys(re.findall(NUMBER, message))
        reason = "Expected a " + " or ".join(kind.removeprefix("Expected a ") for kind in kinds)
        value = re.search(r"Given value: (?!NestedArg|Namespace)(.+)", message)
        reason += f". Got value: {value.group(1)}" if value else ""
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
    hint = f"; the nearest is {near}" if near else f"; choose one of {_listed(known)}" * bool(known)
    return f"there is no class {name} for it{hint}"


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
        options: Iterable[str] = kinds
        near, where = _near(last, kinds), f"of {classes[-1]}"
    else:
        kind = kinds.get(inner[0])
        options = [f.name for f in fields(kind)] if is_dataclass(kind) else []
        near, where = _near(last, options), f"of {'.'.join(inner)}"
        if inner[0] not in kinds:
            last, near, where = key, _near(inner[0], kinds), f"of {classes[-1]}"
    hint = f"; the nearest is {near}" if near else f"; its keys are {_listed(options)}"
    return f"{last} is not a key {where}" + hint * bool(near or options)


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


def _names(kind: Any) -> list[str]:
    """Return the names of the classes that can stand where a class, or what makes one, is asked."""
    made = kind if inspect.isclass(kind) else (get_args(kind) or (None,))[-1]
    every = subclasses(made) if inspect.isclass(made) else []
    every = [c for c in every if not inspect.isabstract(c) and c.__name__[0] != "_"]
    own = [c for c in every if c.__module__.startswith("lit_rl.")]
    return [c.__name__ for c in own or every]


def _argument_types(class_path: str) -> dict[str, Any]:
    kind: Any = locate(class_path) or object
    return {
        name: parameter.annotation
        for name, parameter in parameters(kind).items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def subclasses(kind: type) -> list[type]:
    """Return all subclasses of a class that are imported."""
    direct: list[type] = kind.__subclasses__()
    return [found for sub in direct for found in (sub, *subclasses(sub))]


def parameters(kind: type) -> dict[str, inspect.Parameter]:
    """Return a class's arguments, those taken through `**kwargs` included."""
    found: dict[str, inspect.Parameter] = {}
    for init in (vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)):
        own = inspect.signature(init).parameters
        found = {**own, **found}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values()):
            break
    return {name: parameter for name, parameter in found.items() if name != "self"}


def _near(name: str, options: Iterable[str]) -> str:
    return next(iter(difflib.get_close_matches(name, list(options), n=1, cutoff=0.6)), "")
