"""PrivateFolder: a folder in the user's cache that later runs trust, so nobody else may write to it."""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import pwd
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

_POLL_S = 0.05  # interval between attempts to get a lock, which is held while a compiler runs, for about 2 s


def cache_folder() -> Path:
    """Returns the folder of this package in the user's cache; a RuntimeError if the user has no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_commopt"


class UntrustedError(OSError):
    """A folder or file belongs to another user, or others can write to it; the message says what to do."""


class PrivateFolder:
    """A folder of this user, which is created if it does not exist; for a ``with`` statement.

    Folders above it may be writable by others, who can then put another folder in its place at any time. Therefore the
    folder and each file are opened first and checked afterwards, and files are reached through the descriptor of the
    folder. Symbolic links are followed to the folder, as users move caches to larger disks, but never to a file in it.

    Raises:
        UntrustedError: the folder is another user's, or others can write to it.
        OSError: the folder does not exist and cannot be created.
    """

    def __init__(self, path: Path) -> None:
        for folder in (path.parent, path):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _check(os.fstat(self._fd), path)
        except UntrustedError:
            os.close(self._fd)
            raise

    def __enter__(self) -> PrivateFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def open(self, name: str) -> int | None:
        """Returns a descriptor for reading a file; None if there is none.

        Raises:
            UntrustedError: it is a symbolic link, another user's file, or one that others can write to.
        """
        try:
            return self._open(name, os.O_RDONLY)
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Writes a file for this user only; a reader sees the old content or the new, never a part."""
        unfinished = f".{name}.{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            with os.fdopen(os.open(unfinished, flags, 0o600, dir_fd=self._fd), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # a library that a power loss has truncated would crash its process
            os.replace(unfinished, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except OSError:
            with suppress(OSError):
                os.unlink(unfinished, dir_fd=self._fd)
            raise

    @contextmanager
    def lock(self, name: str, limit_s: float) -> Iterator[None]:
        """Lets one process in at a time; or more, if the file system has no locks or a lock is held for longer.

        Raises:
            UntrustedError: the lock file is a symbolic link, another user's file, or one that others can write to.
        """
        deadline = time.monotonic() + limit_s
        fd = self._open(name, os.O_RDWR | os.O_CREAT)
        try:
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_POLL_S)
                except OSError:
                    break
            yield
        finally:
            os.close(fd)

    def drop_oldest(self, max_files: int, max_age_s: float) -> None:
        """Removes files that were not written for ``max_age_s``, and then the oldest until ``max_files`` are left."""
        written_at: dict[str, float] = {}
        for name in os.listdir(self._fd):
            with suppress(OSError):  # another process has removed it
                written_at[name] = os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mtime
        newest_first = sorted(written_at, key=lambda name: written_at[name], reverse=True)
        for position, name in enumerate(newest_first):
            if position >= max_files or time.time() - written_at[name] > max_age_s:
                with suppress(OSError):
                    os.unlink(name, dir_fd=self._fd)

    def _open(self, name: str, flags: int) -> int:
        path = self.path / name
        try:
            fd = os.open(name, flags | os.O_NOFOLLOW, 0o600, dir_fd=self._fd)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise UntrustedError(f"{path} is a symbolic link: remove it") from None
        try:
            _check(os.fstat(fd), path)
        except UntrustedError:
            os.close(fd)
            raise
        return fd


def _check(status: os.stat_result, path: Path) -> None:
    """Raises an UntrustedError if a folder or file is another user's, or others can write to it."""
    if status.st_uid != os.geteuid():
        raise UntrustedError(
            f"{path} belongs to user {status.st_uid}, not to you ({os.geteuid()}): remove it, or set XDG_CACHE_HOME to"
            " a folder of your own"
        )
    is_shared = bool(status.st_mode & stat.S_IWGRP) and not _is_private_group(status.st_gid)
    if is_shared or status.st_mode & stat.S_IWOTH:
        others = "everybody" if status.st_mode & stat.S_IWOTH else f"group {status.st_gid}"
        raise UntrustedError(
            f"{others} can write to {path}: remove it if you do not trust them, else chmod go-w {path}"
        )


def _is_private_group(gid: int) -> bool:
    """Returns whether a group has only the user: many systems have one for each user, and let its members write."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
