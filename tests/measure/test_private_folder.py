"""What counts as this user's own in a cache, and how a folder of it stays small."""

import grp
import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_commopt.measure import private_folder
from lightning_commopt.measure.private_folder import PrivateFolder, UntrustedError


def _read(folder: PrivateFolder, name: str) -> bytes | None:
    fd = folder.open(name)
    if fd is None:
        return None
    with os.fdopen(fd, "rb") as file:
        return file.read()


def test_a_file_is_written_for_this_user_only(tmp_path: Path) -> None:
    """If it fails, others can read or write the cache, or a reader sees a part of a file."""
    before = os.umask(0)
    try:
        with PrivateFolder(tmp_path / "cache" / "own") as folder:
            assert _read(folder, "a") is None
            folder.write("a", b"first")
            folder.write("a", b"second")
            assert _read(folder, "a") == b"second"
    finally:
        os.umask(before)
    paths = [tmp_path / "cache", tmp_path / "cache" / "own", tmp_path / "cache" / "own" / "a"]
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o700, 0o700, 0o600]
    assert [path.name for path in paths[1].iterdir()] == ["a"]


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a power loss may leave a part of a library in the cache, and loading it ends every later process."""
    sizes = {}

    def fsync(fd: int) -> None:
        sizes[os.fstat(fd).st_ino] = os.fstat(fd).st_size

    def replace(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        assert sizes == {os.stat(source, dir_fd=src_dir_fd).st_ino: 7}
        rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    rename = os.rename
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    with PrivateFolder(tmp_path / "own") as folder:
        folder.write("a", b"content")
        assert _read(folder, "a") == b"content"


def test_what_is_written_replaces_a_link(tmp_path: Path) -> None:
    """If it fails, a link in the cache makes this user overwrite a file of their own."""
    (tmp_path / "victim").write_text("content")
    with PrivateFolder(tmp_path / "own") as folder:
        (tmp_path / "own" / "a").symlink_to(tmp_path / "victim")
        with pytest.raises(UntrustedError, match="symbolic link"):
            folder.open("a")
        folder.write("a", b"new")
        assert _read(folder, "a") == b"new"
    assert (tmp_path / "victim").read_text() == "content"


def test_the_folder_that_was_checked_is_used(tmp_path: Path) -> None:
    """If it fails, another folder takes the place of the one that was checked."""
    with PrivateFolder(tmp_path / "own") as folder:
        folder.write("a", b"mine")
        (tmp_path / "own").rename(tmp_path / "away")
        (tmp_path / "own").mkdir()
        (tmp_path / "own" / "a").write_text("planted")
        assert _read(folder, "a") == b"mine"


def test_the_group_of_one_user_is_no_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, umask 002 with a group for each user makes the cache unusable, or any group counts as private."""
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="ada", pw_gid=7))
    groups: dict[int, tuple[str, list[str]]] = {7: ("ada", []), 8: ("ada", []), 9: ("users", [])}
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name=groups[gid][0], gr_mem=groups[gid][1]))
    assert [private_folder._is_private_group(gid) for gid in (7, 8, 9, 10)] == [True, False, False, False]
    groups[7] = ("ada", ["ada", "eve"])
    assert not private_folder._is_private_group(7)
    groups[7] = ("users", [])
    assert not private_folder._is_private_group(7)


def test_old_files_and_too_many_are_dropped(tmp_path: Path) -> None:
    """If it fails, a cache grows for ever, or loses what was written last."""
    with PrivateFolder(tmp_path / "own") as folder:
        for number in range(6):
            folder.write(str(number), b"")
            os.utime(tmp_path / "own" / str(number), (0, 1e9 + number))
        folder.write("new", b"")
        folder.drop_oldest(3, 1e18)
        assert sorted(path.name for path in (tmp_path / "own").iterdir()) == ["4", "5", "new"]
        folder.drop_oldest(3, 86400)
        assert [path.name for path in (tmp_path / "own").iterdir()] == ["new"]
