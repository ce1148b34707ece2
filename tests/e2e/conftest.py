"""Clusters for the end-to-end tests. Starting one takes about a minute: each serves all tests that want it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.register_assert_rewrite("checks")

import tasks  # noqa: E402
import word_model  # noqa: E402
from breaks import install_break_plugin  # noqa: E402
from checks import Reference, Served, limit  # noqa: E402
from client import generate  # noqa: E402
from cluster import Cluster, Running  # noqa: E402
from flip import install_flip_plugin  # noqa: E402
from force import install_force_plugin, install_seeds_plugin  # noqa: E402
from matrix import (  # noqa: E402
    ANSWER_TOKENS,
    CLUSTERS,
    COLD_TOKENS,
    DEFAULT,
    WITH_BREAKS,
    WITH_FEATURES,
    WITH_FLIP,
    WITH_FORCE,
    WITH_KEYS,
    WITH_NIXL,
)

from sglang_pdd import keys  # noqa: E402

LOGS = Path(__file__).resolve().parents[2] / "out" / "e2e"


def with_keys(spec: Cluster, folder: Path) -> Cluster:
    """The same cluster, encrypted: each role has keys of its own and knows the others'."""
    roles = ("prefill", "relay", "main")
    keys.make(folder, roles)
    flags = {role: (*spec.flags.get(role, ()), "--pdd-keys", str(folder / role)) for role in roles}
    return replace(spec, flags={**spec.flags, **flags})


class Clusters:
    """One cluster at a time, beside a single server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._single = ExitStack()
        self._stack = ExitStack()
        self._reference: Reference | None = None
        self._own: Reference | None = None
        self._name = ""
        self._running: Running | None = None

    def reference(self) -> Reference:
        """A single server with what the present cluster has in common with it, started at its first use."""
        if self._own is not None:
            return self._own
        if self._reference is None:
            self._reference = Reference(self._single.enter_context(Cluster(kind="single").launch(LOGS)))
        return self._reference

    def get(self, name: str) -> Running:
        """The cluster of this name; the one before is stopped."""
        if self._running is None or name != self._name:
            self._stack.close()
            self._running, self._name, self._own = None, name, None
            spec = CLUSTERS[name]
            if name in WITH_NIXL and find_spec("nixl") is None:
                pytest.fail(f"{name} needs NIXL: {sys.executable} -m pip install nixl==1.5.1", pytrace=False)
            folder = self.folder / name
            folder.mkdir()
            if name in WITH_FLIP:
                spec = install_flip_plugin(spec, folder)
            if name in WITH_BREAKS:
                spec = install_break_plugin(spec, folder)
            if name in WITH_KEYS:
                spec = with_keys(spec, folder / "keys")
            if name in WITH_FORCE:
                spec = install_force_plugin(spec, folder)
            if name in WITH_FEATURES:
                spec = install_seeds_plugin(replace(spec, model=word_model.make(folder / "model")), folder)
                alone = replace(spec, kind="single", wan_rate_limit=None)
                self._own = Reference(self._stack.enter_context(alone.launch(LOGS / name)))
            self._running = self._stack.enter_context(spec.launch(LOGS / name))
            self._warm_up(self._running, small=name in WITH_FORCE)  # Triton's interpreter takes a second a token
        return self._running

    @staticmethod
    def _warm_up(cluster: Running, small: bool) -> None:
        """The first request through each role takes seconds: not one that a test should look at."""
        task = tasks.cold(1, 60, 8) if small else tasks.cold(1, COLD_TOKENS, ANSWER_TOKENS)
        generate(cluster.url, task.prompt, limit(task), logprobs=False)

    def close(self) -> None:
        """Stop everything."""
        with self._single, self._stack:
            pass


@pytest.fixture(scope="session")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    """All clusters of this run."""
    clusters = Clusters(tmp_path_factory.mktemp("clusters"))
    yield clusters
    clusters.close()


@pytest.fixture
def served(clusters: Clusters, request: pytest.FixtureRequest) -> Iterator[Served]:
    """The cluster that this test is about; afterwards it must be as it was before."""
    served = Served(clusters.get(request.param), clusters.reference())
    served.begin()
    yield served
    served.end()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test on the clusters it names with ``@pytest.mark.on``, or on the usual ones; in the full run only, on
    those that are called ``full-...`` or named with ``full:`` before it."""
    if "served" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("on")
        names = marker.args if marker else DEFAULT
        params = [
            pytest.param(name.removeprefix("full:"), marks=[pytest.mark.full] if name.startswith("full") else [])
            for name in names
        ]
        metafunc.parametrize("served", params, indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of one cluster together."""
    order = {name: index for index, name in enumerate(CLUSTERS)}

    def place(item: pytest.Item) -> int:
        callspec = getattr(item, "callspec", None)
        return order.get(callspec.params.get("served"), -1) if callspec else -1

    items.sort(key=place)
