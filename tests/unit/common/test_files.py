"""Files that are replaced whole or not at all, and what is no regular file and stays as it is."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpikv import ConfigError, Parameter, Trainer, kv
from mpikv.common.files import open_log, open_regular, place_of, replacing, write_private
from mpikv.config import Config


def replace_file(path: Path | str, write: Callable[[Any], object]) -> None:
    with replacing(path) as file:
        write(file)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # what /dev/null is
    except PermissionError:
        pytest.skip("only root makes devices, and not everywhere")


def local_socket(path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(str(path))


@pytest.mark.parametrize("make", [pipe, device, local_socket, Path.mkdir])
@pytest.mark.parametrize("link", [False, True])
def test_what_is_no_regular_file(make: Callable[[Path], None], link: bool, tmp_path: Path) -> None:
    thing = path = tmp_path / "thing"
    make(thing)
    if link:
        (path := tmp_path / "link").symlink_to(thing)

    def state() -> tuple[Any, ...]:
        status = thing.stat()
        return status.st_ino, status.st_mode, status.st_rdev, os.lstat(path).st_mode, sorted(os.listdir(tmp_path))

    before = state()
    written: list[Any] = []
    with pytest.raises(OSError, match="regular file is expected") as caught:
        replace_file(path, written.append)
    assert caught.value.filename == str(path)
    assert isinstance(caught.value, IsADirectoryError) == (make is Path.mkdir)
    assert written == []
    for call in (open_regular, place_of):
        with pytest.raises(OSError, match="regular file is expected"):
            call(path)
    assert state() == before


def test_modes_and_links(tmp_path: Path) -> None:
    """A file keeps its mode, a new one gets the usual one; a link stays a link, also one to nothing."""
    file, link, lost = tmp_path / "file", tmp_path / "link", tmp_path / "lost"
    before = os.umask(0o027)
    try:
        replace_file(file, lambda stream: stream.write(b"1"))
        assert stat.S_IMODE(file.stat().st_mode) == 0o640
        file.chmod(0o604)
        link.symlink_to(file)
        replace_file(link, lambda stream: stream.write(b"2"))
        assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode), link.is_symlink()) == (b"2", 0o604, True)
        lost.symlink_to(tmp_path / "new")
        replace_file(lost, lambda stream: stream.write(b"3"))
        assert ((tmp_path / "new").read_bytes(), lost.is_symlink()) == (b"3", True)
    finally:
        os.umask(before)

    def fail(stream: Any) -> None:
        stream.write(b"half")
        raise KeyError("no")

    link.unlink()
    link.symlink_to(link)
    nowhere = f"No such file or directory: '{tmp_path}/nowhere/file'$"
    for path, error, text in (
        (file, KeyError, "no"),
        (tmp_path / "nowhere" / "file", FileNotFoundError, nowhere),
        (link, OSError, "symbolic links"),
    ):
        with pytest.raises(error, match=text):
            replace_file(path, fail)
    assert file.read_bytes() == b"2"
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "lost", "new"]


def as_another_user(monkeypatch: pytest.MonkeyPatch, *others: Path) -> None:
    """`others` belong to somebody else than whom this process takes itself for; nothing else does, if this is root."""
    if os.geteuid() == 0:
        for path in others:
            os.lchown(path, 12345, 12345)
        monkeypatch.setattr(os, "geteuid", lambda: 1)
    else:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)


def test_another_users_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that others may write to, somebody could point it at any of the writer's own files."""
    mine, shared = tmp_path / "mine", tmp_path / "shared"
    mine.write_bytes(b"dear to me")
    shared.mkdir()
    (shared / "model").symlink_to(mine)
    (shared / "twice").symlink_to("model")
    (shared / "ours").symlink_to(shared)
    user = os.geteuid() or 12345
    as_another_user(monkeypatch, shared / "model", shared / "ours")
    for path in (shared / "model", shared / "twice", shared / "ours" / "model"):
        with pytest.raises(PermissionError, match="another user") as caught:
            replace_file(path, lambda file: file.write(b"x"))
        assert caught.value.filename == str(path)
    assert mine.read_bytes() == b"dear to me"
    monkeypatch.setattr(os, "geteuid", lambda: user)  # now they are
    replace_file(shared / "twice", lambda file: file.write(b"x"))
    assert (mine.read_bytes(), (shared / "twice").is_symlink()) == (b"x", True)
    assert sorted(os.listdir(shared)) == ["model", "ours", "twice"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs files of several users")
def test_folders_that_another_user_links_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are not followed, unless the folder with the link is that user's, too."""
    mine, shared, theirs = (tmp_path / name for name in ("mine", "shared", "theirs"))
    for folder in (mine, shared, theirs):
        folder.mkdir()
        (folder / "link").symlink_to(mine)
    (mine / "deep").mkdir()
    (mine / "deep" / "c").touch()
    os.chown(mine / "deep" / "c", 1, 1)  # whom this process takes itself for below
    (shared / "more").symlink_to("../shared/./link/deep")
    as_another_user(monkeypatch, shared / "link", theirs, theirs / "link")
    for path in (shared / "link" / "model", shared / "more" / "model"):
        with pytest.raises(
            PermissionError, match=rf"{shared}/link, a symbolic link that another user has made"
        ) as caught:
            replace_file(path, lambda file: file.write(b"x"))
        assert caught.value.filename == str(path)
        with pytest.raises(PermissionError, match="another user"):
            open_log(path)
    before = mine.stat().st_mtime_ns
    with pytest.raises(PermissionError, match="another user"):  # and not even the file beside it is made there
        Trainer([Parameter(np.zeros(3))], "sgd").save(shared / "link" / "model")
    assert mine.stat().st_mtime_ns == before
    with (
        kv.create("local", config=Config(stop_file=str(shared / "link" / "model"))) as store,
        pytest.raises(ConfigError, match=r"MPIKV_STOP_FILE=.*another user"),
    ):
        Trainer([Parameter(np.zeros(3))], "sgd", kvstore=store)
    assert sorted(os.listdir(mine)) == ["deep", "link"]
    monkeypatch.chdir(theirs)
    for name in ("link/a", "../theirs/link/../mine/deep/../b"):
        replace_file(name, lambda file: file.write(b"x"))
    open_log(theirs / "link" / "deep" / "c").close()
    assert sorted(os.listdir(mine)) == ["a", "b", "deep", "link"]
    assert os.listdir(mine / "deep") == ["c"]


def test_modes_of_another_users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than umask allows, and no set-user-id, neither there nor of one's own file; as a log it is refused."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for file in (mine, theirs):
        file.touch()
        file.chmod(0o6775)
    before = os.umask(0o077)
    try:
        replace_file(mine, lambda file: file.write(b"x"))
        as_another_user(monkeypatch, theirs)
        theirs.chmod(0o6775)
        with pytest.raises(PermissionError, match="is another user's file"):
            open_log(theirs)
        replace_file(theirs, lambda file: file.write(b"x"))
    finally:
        os.umask(before)
    assert [stat.S_IMODE(file.stat().st_mode) for file in (mine, theirs)] == [0o775, 0o700]


def test_nobody_reads_a_private_file_while_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_private(file, "secret")
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == ("secret", 0o600)
    with pytest.raises(FileExistsError):
        write_private(file, "again")

    def write(stream: Any) -> None:
        assert [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()] == [0o600, 0o600]
        stream.write(b"new")

    replace_file(file, write)
    assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) == (b"new", 0o600)


@pytest.mark.parametrize("keep", [False, True])
def test_logs(keep: bool, tmp_path: Path) -> None:
    """Emptied, or gone on with after what is there; but through no link, and nothing else than a file."""
    file = tmp_path / "log"
    for text in (b"1", b"2"):
        with open_log(file, keep=keep) as log:
            assert log.tell() == file.stat().st_size == (text == b"2" and keep)
            log.write(text)
            assert keep or file.read_bytes() == text
    (tmp_path / "link").symlink_to(file)
    (tmp_path / "lost").symlink_to(tmp_path / "new")
    os.mkfifo(tmp_path / "pipe")  # which does not make anybody wait
    for name in ("link", "lost", "pipe"):
        with pytest.raises(OSError, match=name):
            open_log(tmp_path / name, keep=keep)
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match=r"is a pipe.*; a regular file is expected"):
        open_log(tmp_path / "pipe", keep=keep)
    os.close(reader)
    assert file.read_bytes() == (b"12" if keep else b"2")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("write", [replace_file, lambda path, _: open_log(path).close(), write_private])
def test_a_link_that_comes_after_the_look_leads_nowhere(write: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Somebody may rename a folder on the way, and put a link in its place, while it is gone."""
    mine, way = tmp_path / "mine", tmp_path / "way"
    mine.mkdir()
    way.mkdir()
    open_ = os.open

    def slow(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_CREAT and not way.is_symlink():
            way.rename(tmp_path / "moved")
            way.symlink_to(mine)
        return open_(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", slow)
    write(way / "file", (lambda stream: stream.write(b"x")) if write is replace_file else "x")
    monkeypatch.undo()
    assert (os.listdir(mine), os.listdir(tmp_path / "moved")) == ([], ["file"])


def test_what_is_read_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, pipe_ = tmp_path / "file", tmp_path / "pipe"
    file.write_bytes(b"12345")
    with open_regular(file, 5) as stream:
        assert stream.read() == b"12345"
    with pytest.raises(OSError, match="has 5 bytes, and may have 4") as caught:
        open_regular(file, 4)
    assert (caught.value.filename, caught.value.errno) == (str(file), errno.EFBIG)
    os.mkfifo(pipe_)
    status = file.stat()
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda path: status)  # the pipe has come after the look
        with pytest.raises(OSError, match=r"is a pipe.*; a regular file is expected"):
            open_regular(pipe_)
