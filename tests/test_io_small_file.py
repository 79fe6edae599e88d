"""Small files beside a store: whatever lies in their place is not waited for, nor read whole."""

import os
import socket
import stat
from pathlib import Path

import pytest

from kvtier.io.small_file import can_be_shown, read_small, replace_file


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"1234")
    (tmp_path / "link").symlink_to(path)
    assert read_small(path, 4) == read_small(tmp_path / "link", 9) == b"1234"
    with pytest.raises(ValueError, match="more than 3 bytes"):
        read_small(path, 3)
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "b", 3)
    with pytest.raises(IsADirectoryError):
        read_small(tmp_path, 3)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match="not a regular file"):
            read_small(path, 3)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="No such device"):
            read_small(tmp_path / "socket", 3)


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in ("old", "new \u00e9"):
        replace_file(path, text, durable=True)
        assert path.read_text("utf-8") == text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("kind", ["file", "pipe", "link", "dangling", "loop", "socket"])
def test_what_lies_where_the_new_file_is_written_is_neither_waited_for_nor_followed(
    tmp_path: Path, kind: str
) -> None:
    path, new, other = tmp_path / "a", tmp_path / "a.new", tmp_path / "other"
    other.write_text("of somebody else")
    match kind:
        case "file":
            new.write_text("longer than what comes next")
            new.chmod(0o644)
        case "pipe":
            os.mkfifo(new)
        case "socket":
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(str(new))
        case _:
            new.symlink_to({"link": other, "dangling": tmp_path / "none", "loop": new}[kind])
    replace_file(path, "text")
    assert path.read_text() == "text"
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert other.read_text() == "of somebody else"
    assert sorted(os.listdir(tmp_path)) == ["a", "other"]


def test_a_directory_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "a.new").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "a", "text")
    assert (tmp_path / "a.new").is_dir()


@pytest.mark.parametrize("text", ["\x1b[2J", "a\nb", "\x7f", "\x9b", "\ud800"])
def test_text_that_steers_a_terminal_is_known(text: str) -> None:
    assert not can_be_shown(text)
    assert can_be_shown("plain, \u00e9\u3000\U0001f600")
