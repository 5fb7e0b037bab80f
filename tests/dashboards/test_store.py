from __future__ import annotations

import time
from pathlib import Path

import pytest

import dashboards.store
from dashboards.app import begin_reading, create_app
from dashboards.store import Loaded, Opening, Store
from tests.dashboards.synthetic import write_run


def test_an_analysis_is_made_once_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, "1f1b", pp=2, num_microbatches=2)
    store = Store([tmp_path])
    seen: list[Opening] = []
    note = store._note
    monkeypatch.setattr(store, "_note", lambda progress: (note(progress), seen.append(store.opening)))
    assert not store.opening.is_open
    first = store.get()
    assert store.opening.is_open
    assert [part.is_open for part in seen] == [False] * len(seen)
    assert [part.read for part in seen] == sorted(part.read for part in seen), "it only grows"
    assert (seen[0].num_files, seen[0].read, seen[-1].read) == (2, 0, 1)
    assert store.get() is first
    assert [step.step for step in first.steps] == [2]
    write_run(tmp_path, "1f1b", pp=2, num_microbatches=2, num_steps=2)
    assert [step.step for step in store.get().steps] == [2, 3]


def test_a_missing_path_is_an_error_line(tmp_path: Path) -> None:
    loaded = Store([tmp_path / "nowhere"]).get()
    assert loaded.analysis is None
    assert loaded.error.startswith(f"{tmp_path / 'nowhere'}: not found")
    assert loaded.files == ()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_run_json_is_no_obstacle(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(content)
    loaded = Store([tmp_path]).get()
    assert loaded.run == {}
    assert loaded.error != ""
    assert [file.name for file in loaded.files] == ["run.json"]


def test_a_mistake_of_our_own_is_a_line_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(dashboards.store, "reopen", fail)
    loaded = Store([tmp_path]).get()
    assert loaded.error.startswith("ZeroDivisionError: division by zero")


def test_several_paths_are_named_after_the_first(tmp_path: Path) -> None:
    assert Loaded((tmp_path / "a", tmp_path / "b")).title == "a and 1 more"


def test_a_run_is_read_while_the_browser_opens(run_p4: Path) -> None:
    app = create_app([run_p4])
    client = app.server.test_client()
    assert not client.get("/timeline-data/opening").get_json()["is_open"]
    begin_reading(app)
    ends = time.monotonic() + 60
    while not client.get("/timeline-data/opening").get_json()["is_open"]:
        assert time.monotonic() < ends
        time.sleep(0.02)
