"""When two nodes are in the same state, and how to try something on a copy."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import fields, is_dataclass
from types import FunctionType, MethodType
from typing import Any

from world import Scenario

from sglang_pdd.config import PddConfig
from sglang_pdd.metrics import Counters

# Of these a node has what it was made with.
_CONSTANT = (Scenario, Counters, PddConfig, FunctionType, MethodType)
_ATOMS = (int, str, bool, float, type(None), tuple, frozenset, bytes)
_OLD = 16.0  # seconds: older than every time-out


def _parts(value: Any) -> dict[str, Any]:
    slots = {f.name: getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else {}
    parts = {**slots, **getattr(value, "__dict__", {})}
    if not parts and not is_dataclass(value):
        raise TypeError(f"cannot look into {value!r}")
    return parts


def clone(value: Any) -> Any:
    """A deep copy that shares what does not change."""
    kind = type(value)
    if kind in _ATOMS or isinstance(value, _CONSTANT):
        return value
    if kind in (dict, OrderedDict):
        return kind((k, clone(v)) for k, v in value.items())
    if kind in (list, set):
        return kind(map(clone, value))
    if is_dataclass(kind) and getattr(kind, "__dataclass_params__").frozen:  # noqa: B009
        return value
    copy = object.__new__(kind)
    for name, part in _parts(value).items():
        setattr(copy, name, clone(part))
    return copy


def key(value: Any, now: float) -> Any:
    """Equal for what behaves alike. Of a time, which every float is, only the age counts."""
    kind = type(value)
    if kind is float:
        return min(now - value, _OLD)
    if kind in _ATOMS and kind is not tuple:
        return value
    if kind in (tuple, list, OrderedDict):
        items = value.items() if kind is OrderedDict else value
        return tuple(key(v, now) for v in items)
    if kind is dict:
        return frozenset((k, key(v, now)) for k, v in value.items())
    if kind is set:
        return frozenset(value)
    if isinstance(value, _CONSTANT):
        return None
    return (kind, *(key(v, now) for name, v in _parts(value).items() if name not in ("now", "out")))
