"""Checks what `table` says of SGLang, installs our hooks, and ends the process if one is not in place.

SGLang's plugin loader logs and swallows every `Exception`; `SystemExit` passes through it.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
import inspect
import logging
import pkgutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType
from typing import Any, NoReturn

from sglang_pdd.patches.table import ENTRIES, Entry, Process

SUPPORTED = ("0.5.23",)

logger = logging.getLogger(__name__)

failures: Counter[str] = Counter()  # path of a ``safe`` hook's target -> exceptions swallowed
seconds: dict[str, float] = defaultdict(float)  # path of a hook's target -> spent in our hook, not in what it is around
_installed: dict[Entry, Callable[..., Any]] = {}


def fail(problem: str) -> NoReturn:
    """End the process with one line on stderr."""
    raise SystemExit(f"sglang-pdd: {problem}")


def check_version() -> str | None:
    """What is wrong with the SGLang that is installed, or None."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        return f"sglang is not installed: install sglang=={SUPPORTED[-1]}"
    return None if found in SUPPORTED else f"sglang: expected {' or '.join(SUPPORTED)}, found {found}; {_remedy(found)}"


def check(entries: Iterable[Entry]) -> list[str]:
    """Compare ``entries`` with SGLang: one line each difference: what, expected, found, what to do."""
    problems = []
    for entry in entries:
        difference = _difference(entry)
        if difference is not None:
            problems.append(f"{entry.path}: {difference}; {_remedy(version('sglang'))}")
    return problems


def check_all() -> list[str]:
    """Everything, for all roles."""
    wrong = check_version()
    return ([wrong] if wrong else []) + check(ENTRIES)


def install(role: str, process: Process) -> None:
    """Register the hooks of ``role`` (``any``: of all roles only) in this process; check them once applied.

    The launcher checks the schedulers' entries too, so that a misfit is reported once and before the model loads.
    """
    mine = [entry for entry in ENTRIES if role in entry.roles or "any" in entry.roles]
    wrong = check_version()
    problems = [wrong] if wrong else check(e for e in mine if process == "launcher" or e.process == process)
    if problems:
        more = f" (and {len(problems) - 1} more: see `sglang-pdd doctor`)" if len(problems) > 1 else ""
        fail(problems[0] + more)

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _verify_after_apply()
    for entry in mine:
        if entry.hook is None or entry.process != process or entry in _installed:
            continue
        hook = _load(entry)
        _installed[entry] = hook
        HookRegistry.register(entry.path, hook, HookType(entry.hook), source=_source())


def apply_now() -> None:
    """Apply hooks registered after SGLang applied its plugins' hooks.

    The registry skips a target that it has patched before (another plugin's, say); ours then goes on top of it.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for entry, hook in _installed.items():
        if entry.path in HookRegistry._patched and not _in_place(entry, hook):
            HookRegistry._apply_target(entry.path, [(HookType(entry.hook), hook, _source())])
    HookRegistry.apply_hooks()


def verify() -> None:
    """End the process if a registered hook is not in place."""
    for entry, hook in _installed.items():
        if not _in_place(entry, hook):
            fail(f"{entry.path}: our hook was not applied, see the log above; other plugins: set SGLANG_PLUGINS=pdd")


def _verify_after_apply() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    original = HookRegistry.apply_hooks.__func__
    if getattr(original, "pdd", False):
        return

    @functools.wraps(original)
    def apply_hooks(cls: Any) -> None:
        original(cls)
        verify()

    apply_hooks.pdd = True  # type: ignore[attr-defined]
    HookRegistry.apply_hooks = classmethod(apply_hooks)


def _source() -> Any:
    from sglang.srt.plugins.hook_registry import HookSource

    return HookSource("pdd", "sglang-pdd")


# They wait: workers for the link, an idle scheduler for whatever comes.
_WAITING = ("idle", "lanes", "mooncake", "nixl", "streams")


def _load(entry: Entry) -> Callable[..., Any]:
    assert entry.by is not None, entry.path
    module, _, name = entry.by.partition(":")
    hook: Callable[..., Any] = getattr(importlib.import_module(f"sglang_pdd.patches.{module}"), name)
    hook = _fail_open(entry, hook) if entry.safe else hook
    return hook if entry.process == "launcher" or module in _WAITING else _timed(entry, hook)


def _timed(entry: Entry, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Count the seconds that the hook takes without what it goes around."""
    around = entry.hook == "around"

    @functools.wraps(hook)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin, stock = time.perf_counter(), 0.0

        def original(*args_: Any, **kwargs_: Any) -> Any:
            nonlocal stock
            start = time.perf_counter()
            try:
                return inner(*args_, **kwargs_)
            finally:
                stock += time.perf_counter() - start

        if around:
            inner, args = args[0], (original, *args[1:])
        try:
            return hook(*args, **kwargs)
        finally:
            seconds[entry.path] += time.perf_counter() - begin - stock

    return timed


def _fail_open(entry: Entry, hook: Callable[..., Any]) -> Callable[..., Any]:
    assert not inspect.iscoroutinefunction(hook), f"{entry.by}: a coroutine raises only when awaited"

    @functools.wraps(hook)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except Exception:
            if not failures[entry.path]:
                logger.exception("pdd: hook %s failed; going on without it, later failures are only counted", entry.by)
            failures[entry.path] += 1
        return args[0](*args[1:], **kwargs) if entry.hook == "around" else None

    return guarded


def _in_place(entry: Entry, hook: Callable[..., Any]) -> bool:
    return any(cell is hook for layer in _layers(_resolve(entry.path)) for cell in _closure(layer))


def _layers(function: Any) -> Iterator[Any]:
    """``function`` and all that it wraps."""
    while function is not None:
        function = getattr(function, "__func__", function)
        yield function
        function = getattr(function, "__wrapped__", None)


def _closure(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # not filled yet
            yield cell.cell_contents


def _resolve(path: str) -> Any:
    """The object at ``path``, before the descriptor protocol where its owner is a class."""
    owner_path, _, name = path.rpartition(".")
    owner = pkgutil.resolve_name(owner_path)
    return inspect.getattr_static(owner, name) if isinstance(owner, type) else getattr(owner, name)


def _difference(entry: Entry) -> str | None:
    if entry.kind in ("attribute", "field"):
        owner_path, _, name = entry.path.rpartition(".")
        try:
            owner = pkgutil.resolve_name(owner_path)
        except (ImportError, AttributeError) as error:
            return f"expected {entry.kind} {name}, but {error}"
        return None if _has(owner, name) else f"expected {entry.kind} {name}, found none"
    try:
        found = _resolve(entry.path)
    except (ImportError, AttributeError) as error:
        return f"expected a {entry.kind}, but {error}"
    if any(
        (entry.kind == kind) != isinstance(found, of) for kind, of in (("classmethod", classmethod), ("class", type))
    ):
        return f"expected a {entry.kind}, found a {type(found).__name__}"
    if entry.signature is not None:
        signature = describe(found)
        if signature != entry.signature:
            return f"expected {entry.signature}, found {signature}"
    return None


def _has(owner: Any, name: str) -> bool:
    """Whether ``owner`` has ``name``, be it a value, a field, an annotation, or assigned by one of its methods."""
    if hasattr(owner, name) or name in getattr(owner, "__struct_fields__", ()):
        return True
    for base in getattr(owner, "__mro__", ()):
        if name in inspect.get_annotations(base):
            return True
        for value in vars(base).values():
            *_, function = (None, *_layers(value))
            if isinstance(function, FunctionType) and any(
                step.opname == "STORE_ATTR" and step.argval == name for step in dis.get_instructions(function)
            ):
                return True
    return False


def describe(function: Any) -> str:
    """The signature as `Entry.signature` writes it, of the innermost function that ``function`` wraps."""
    *_, innermost = _layers(function)
    signature = inspect.signature(innermost)
    parameters = [
        parameter.replace(
            annotation=inspect.Parameter.empty,
            default=parameter.default if parameter.default is parameter.empty else _Default(parameter.default),
        )
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


class _Default:
    """Writes a default: a plain literal as it is, anything else as ``...``."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        plain = self.value is None or isinstance(self.value, bool | int | float | str)
        return repr(self.value) if plain else "..."


def _remedy(found: str) -> str:
    if found in SUPPORTED:
        return f"sglang {found} is installed but was changed: reinstall it"
    return f"sglang {found} is not supported, use sglang=={SUPPORTED[-1]} or a newer sglang-pdd"
