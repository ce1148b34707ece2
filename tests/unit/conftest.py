"""What several unit tests of the KV streams begin with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from wan_pair import Pair, wait_for

from sglang_pdd import keys


@pytest.fixture
def make_pair(request: pytest.FixtureRequest) -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def pair(**options: object) -> Pair:
        pairs.append(Pair(**options))  # type: ignore[arg-type]
        return pairs[-1]

    before = threading.active_count()
    yield pair
    for each in pairs:
        each.close()
    wait_for(lambda: not [t for t in threading.enumerate() if t.name.startswith("pdd-stream")])
    assert threading.active_count() <= before + 50


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("keys")
    keys.make(folder, ["p", "md"])
    keys.make(folder / "other", ["p", "md"])
    return folder
