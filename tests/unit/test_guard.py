"""`guard` against a module made up here, so that no test depends on a running SGLang."""

import sys
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_pdd.patches import guard
from sglang_pdd.patches.table import ENTRIES, Entry


class Engine:
    kept = 1
    annotated: int

    def __init__(self):
        self.assigned = 0

    def step(self, req, last=False, *, end=None, options=frozenset()):
        return ("step", req)

    @classmethod
    def make(cls, args):
        return ("make", args)

    @staticmethod
    def helper(x):
        return x


@dataclass
class Record:
    room: int


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """A fresh module ``made_up`` and a registry of our own."""
    module = ModuleType("made_up")
    module.Engine = type("Engine", (Engine,), {**vars(Engine)})
    module.Record = Record
    module.function = lambda a, b=2: a
    monkeypatch.setitem(sys.modules, "made_up", module)
    monkeypatch.setattr(guard, "version", lambda name: "0.5.23")
    monkeypatch.setattr(guard, "_installed", {})
    monkeypatch.setattr(HookRegistry, "_hooks", HookRegistry._hooks.__class__(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(HookRegistry, "apply_hooks", HookRegistry.__dict__["apply_hooks"])
    guard.failures.clear()
    return module


def entry(path: str, kind: str = "method", signature: str | None = None, **more) -> Entry:
    return Entry(f"made_up.{path}", kind, "a test", signature, **more)


@pytest.mark.parametrize(
    "good",
    [
        entry("Engine.step", "method", "(self, req, last=False, *, end=None, options=...)"),
        entry("Engine.make", "classmethod", "(cls, args)"),
        entry("Engine.helper", "function", "(x)"),
        entry("function", "function", "(a, b=2)"),
        entry("Engine", "class"),
        entry("Record", "class", "(room)"),
        entry("Record.room", "field"),
        entry("Engine.kept", "attribute"),
        entry("Engine.annotated", "attribute"),
        entry("Engine.assigned", "attribute"),
    ],
)
def test_what_fits(good):
    assert guard.check([good]) == []


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (entry("Engine.step", "method", "(self, req)"), "expected (self, req), found (self, req, last=False, *, end"),
        (entry("Engine.gone", "method"), "expected a method, but"),
        (entry("Engine.make", "method"), "expected a method, found a classmethod"),
        (entry("Engine.step", "classmethod"), "expected a classmethod, found a function"),
        (entry("Engine.step", "class"), "expected a class, found a function"),
        (entry("Engine.gone", "attribute"), "expected attribute gone, found none"),
        (entry("Record.gone", "field"), "expected field gone, found none"),
        (entry("Nothing.x", "field"), "expected field x, but"),
        (Entry("no_such_module.x", "function", "a test"), "expected a function, but No module named"),
    ],
)
def test_what_does_not(bad, words, monkeypatch):
    (problem,) = guard.check([bad])
    assert problem.startswith(bad.path + ": ") and words in problem and "\n" not in problem
    assert problem.endswith("sglang 0.5.23 is installed but was changed: reinstall it")
    monkeypatch.setattr(guard, "version", lambda name: "0.6.0")
    assert guard.check([bad])[0].endswith("sglang 0.6.0 is not supported, use sglang==0.5.23 or a newer sglang-pdd")


def test_signatures_are_read_through_other_plugins_wrappers(engine):
    HookRegistry.register("made_up.Engine.step", lambda result, *args, **kwargs: None, HookType.AFTER)
    HookRegistry.apply_hooks()
    assert guard.check([entry("Engine.step", "method", "(self, req, last=False, *, end=None, options=...)")]) == []


def use(monkeypatch, hook, *entries):
    """Make ``entries`` the table, and ``hook`` the function that all of them name."""
    module = ModuleType("sglang_pdd.patches.made_up_hooks")
    module.hook = hook
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entries = [replace(one, by="made_up_hooks:hook") if one.hook else one for one in entries]
    monkeypatch.setattr(guard, "ENTRIES", tuple(entries))


def test_installs_only_the_roles_hooks_of_this_process(engine, monkeypatch):
    use(
        monkeypatch,
        lambda result, *args: ("hooked", result),
        entry("Engine.step", roles=("main",), hook="after"),
        entry("Engine.make", "classmethod", roles=("any",), hook="after"),
        entry("Engine.helper", "function", roles=("relay",), hook="after"),
        entry("function", "function", roles=("main",), process="launcher", hook="after"),
    )
    guard.install("main", "scheduler")
    guard.install("main", "scheduler")  # again: nothing twice
    HookRegistry.apply_hooks()
    assert engine.Engine().step(1) == ("hooked", ("step", 1))
    assert engine.Engine.make(1) == ("hooked", ("make", 1))
    assert engine.Engine.helper(1) == 1
    assert engine.function(1) == 1


def test_on_top_of_a_target_that_another_plugin_has_patched(engine, monkeypatch):
    use(monkeypatch, lambda result, *args: ("ours", result), entry("function", "function", hook="after"))
    HookRegistry.register("made_up.function", lambda result, *args: ("theirs", result), HookType.AFTER)
    HookRegistry.apply_hooks()
    guard.install("any", "scheduler")
    guard.apply_now()
    guard.apply_now()
    assert engine.function(1) == ("ours", ("theirs", 1))


def test_ends_the_process_if_a_hook_was_not_applied(engine, monkeypatch):
    use(monkeypatch, lambda result, *args: None, entry("Engine", "class", hook="after"))  # classes cannot be wrapped
    guard.install("any", "scheduler")
    with pytest.raises(SystemExit, match=r"^sglang-pdd: made_up.Engine: our hook was not applied"):
        HookRegistry.apply_hooks()


def test_ends_the_process_on_a_misfit_and_registers_nothing(engine, monkeypatch):
    use(
        monkeypatch,
        lambda result, *args: None,
        entry("function", "function", hook="after"),
        entry("function", "function", "(a)", roles=("main",)),
        entry("gone", "function", roles=("main",)),
        entry("gone", "function", roles=("relay",)),
    )
    with pytest.raises(SystemExit) as end:
        guard.install("main", "launcher")  # a scheduler's entries, checked in the launcher already
    assert str(end.value).startswith("sglang-pdd: made_up.function: expected (a), found (a, b=2);")
    assert "(and 1 more: see `sglang-pdd doctor`)" in str(end.value) and "\n" not in str(end.value)
    assert not HookRegistry._hooks


def test_ends_the_process_on_another_version(monkeypatch):
    monkeypatch.setattr(guard, "version", lambda name: "0.5.24")
    with pytest.raises(SystemExit, match=r"sglang: expected 0\.5\.23, found 0\.5\.24; sglang 0\.5\.24 is not"):
        guard.install("any", "launcher")


@pytest.mark.parametrize("hook", ["before", "after", "around"])
def test_a_safe_hook_fails_open_is_counted_and_logged_once(hook, engine, monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise KeyError("oops")

    use(monkeypatch, broken, entry("Engine.step", hook=hook, safe=True))
    guard.install("any", "scheduler")
    HookRegistry.apply_hooks()
    assert [engine.Engine().step(i) for i in range(3)] == [("step", i) for i in range(3)]
    assert guard.failures == {"made_up.Engine.step": 3}
    assert len([record for record in caplog.records if record.exc_info]) == 1


def test_a_hook_that_is_not_safe_raises(engine, monkeypatch):
    def broken(*args):
        raise KeyError("oops")

    use(monkeypatch, broken, entry("function", "function", hook="before"))
    guard.install("any", "scheduler")
    HookRegistry.apply_hooks()
    with pytest.raises(KeyError):
        engine.function(1)


def test_the_table_is_well_formed():
    assert len(set(ENTRIES)) == len(ENTRIES)
    for one in ENTRIES:
        assert (one.hook is None) == (one.by is None), one
        assert one.why, one
        assert set(one.roles) <= {"prefill", "relay", "main", "pace", "attention", "any"} and one.roles, one
        if one.hook:
            assert one.kind in ("function", "method", "classmethod") and one.signature, one
