"""Results are complete or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from recap.io.files import staged_file, staged_folder, write_whole

MARKER = "done.json"
NAMES = (MARKER, "sub")


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_write_whole_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.bin"
    write_whole(path, b"one")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two" and names(path.parent) == ["a.bin"]


def test_failure_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def interrupted() -> None:
        with staged_file(path) as staged:
            staged.write_text("half of the n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old" and names(tmp_path) == ["a.txt"]


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it is a folder"):
        write_whole(tmp_path, b"")


def test_names_as_long_as_the_system_allows(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 251 + ".txt")
    write_whole(path, b"1")
    assert path.read_bytes() == b"1"


def fill(out: Path, text: str) -> None:
    with staged_folder(out, NAMES) as folder:
        (folder / MARKER).write_text(text)
        (folder / "sub").mkdir()
        (folder / "sub" / text).write_text(text)


def test_folder_appears_and_is_renewed(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    fill(out, "first")
    fill(out, "second")
    assert (out / MARKER).read_text() == "second"
    assert names(out / "sub") == ["second"] and names(out.parent) == ["out"]


def test_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    fill(tmp_path / "out", "x")
    assert (tmp_path / "out" / MARKER).exists()


def test_link_survives(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    fill(link, "x")
    assert link.is_symlink() and (tmp_path / "real" / MARKER).exists()


def test_failure_keeps_the_old_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fill(out, "old")

    def failing() -> None:
        with staged_folder(out, NAMES) as folder:
            (folder / MARKER).write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        failing()
    assert (out / MARKER).read_text() == "old" and names(tmp_path) == ["out"]


def test_folders_of_others_are_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("mine")
    with pytest.raises(ValueError, match="choose another --out"), staged_folder(tmp_path, NAMES):
        pytest.fail("the work was begun")
    assert names(tmp_path) == ["letters.txt"]


def test_a_folder_filled_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def overtaken() -> None:
        with staged_folder(out, NAMES) as folder:
            (folder / MARKER).write_text("new")
            out.mkdir()
            (out / "letters.txt").write_text("mine")

    with pytest.raises(ValueError, match="choose another --out"):
        overtaken()
    assert names(out) == ["letters.txt"] and names(tmp_path) == ["out"]


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ValueError, match="it is a file"), staged_folder(tmp_path / "out", NAMES):
        pass


def test_a_result_next_to_something_else_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fill(out, "old")
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes\.txt"):
        fill(out, "new")
    assert (out / MARKER).read_text() == "old" and (out / "notes.txt").read_text() == "mine"


def test_the_current_folder_is_not_pulled_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="current folder"):
        fill(Path(), "x")
