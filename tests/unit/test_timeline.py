import json
import os
import threading
import time
from pathlib import Path

import pytest

from sglang_pdd.timeline import Timeline, read


def test_events_can_be_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    timeline = Timeline(str(path), "main", "md1")
    before = time.time()
    timeline.event("emit", 7, start=0, n=2)
    timeline.event("hello")
    first, second = read(path)
    assert before <= first.pop("t") <= time.time()
    assert first == {"role": "main", "node": "md1", "event": "emit", "room": 7, "start": 0, "n": 2}
    assert "room" not in second and second["event"] == "hello"
    timeline.close()
    timeline.event("late")
    assert len(read(path)) == 2


def test_several_writers_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    writers = [Timeline(str(path), "relay", f"n{i}") for i in range(4)]

    def work(timeline: Timeline) -> None:
        for i in range(200):
            timeline.event("x", i, text="y" * 500)

    threads = [threading.Thread(target=work, args=(w,)) for w in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = read(path)
    for writer in writers:
        assert [e["room"] for e in events if e["node"] == writer._own["node"]] == list(range(200))


def test_fields_never_replace_our_own_and_odd_values_become_text(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    timeline = Timeline(str(path), "main", "md")
    timeline.event("x", role="liar", name="fine", value={1, 2}, path=path)
    (event,) = read(path)
    assert event["role"] == "main" and event["name"] == "fine" and event["path"] == str(path)


def test_without_a_path_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "dumps", None)
    monkeypatch.setattr(os, "write", None)
    Timeline(None, "main", "md").event("x", 1, a=2)


def test_errors_are_logged_once_and_never_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nowhere = Timeline(str(tmp_path / "no" / "t"), "main", "md")
    nowhere.event("x")
    assert nowhere.errors == 1 and len(caplog.messages) == 1
    caplog.clear()
    timeline = Timeline(str(tmp_path / "t"), "main", "md")
    read_only = os.open(tmp_path / "t", os.O_RDONLY)
    os.dup2(read_only, timeline._fd)
    os.close(read_only)
    for _ in range(3):
        timeline.event("x")
    circular: list[object] = []
    circular.append(circular)
    timeline.event("x", value=circular)
    assert timeline.errors == 4 and len(caplog.messages) == 1
    timeline.close()


def test_a_cut_last_line_is_left_out_but_a_bad_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"event":"a"}\n{"event":"b"')
    assert read(path) == [{"event": "a"}]
    path.write_text('{"event":"a"}\nnonsense\n{"event":"b"}\n')
    with pytest.raises(ValueError, match=r"t\.jsonl:2"):
        read(path)
    path.write_text("5\n")
    with pytest.raises(ValueError, match="not an object"):
        read(path)
    path.write_text("")
    assert read(path) == []
