# SPDX-License-Identifier: Apache-2.0
"""Files that appear whole, with the mode that was asked for, where only root can write."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpustasis import files

NOBODY = 65534


@pytest.fixture(params=[0o000, 0o022, 0o277])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.mark.usefixtures("umask")
def test_modes_do_not_follow_the_umask(tmp_path: Path, directory: int) -> None:
    files.replace_file(directory, "file", b"text", 0o644)
    assert ((tmp_path / "file").read_text(), mode(tmp_path / "file")) == ("text", 0o644)
    files.make_directories(str(tmp_path / "a/b"), 0o755)
    os.close(files.open_own_directory(str(tmp_path / "c/d"), 2, 0o700))
    modes = [mode(tmp_path / name) for name in ("a", "a/b", "c", "c/d")]
    assert modes == [0o755, 0o755, 0o700, 0o700]


def test_what_fails_leaves_the_file_that_was_there(tmp_path: Path, directory: int) -> None:
    (tmp_path / "file").write_text("before")

    def fail(descriptor: int) -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        files.replace_file(directory, "file", b"after", 0o600, prepare=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "before"


def test_an_error_says_that_the_new_file_is_in_place(
    tmp_path: Path, directory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.fsync

    def fail(descriptor: int) -> None:
        if descriptor == directory:
            raise OSError(errno.EIO, "Input/output error")
        whole(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"is in place.*Input/output error") as caught:
        files.replace_file(directory, "file", b"after", 0o600)
    assert caught.value.errno == errno.EIO
    assert (tmp_path / "file").read_text() == "after"


def test_a_planted_part_is_not_followed(tmp_path: Path, directory: int) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".file.part").symlink_to(victim)
    files.replace_file(directory, "file", b"text", 0o600)
    assert victim.read_text() == "mine"
    assert not (tmp_path / "file").is_symlink()


@pytest.mark.parametrize("wrong", ["owner", "group", "others", "link"])
def test_a_directory_that_is_not_ours_alone(tmp_path: Path, wrong: str) -> None:
    inner = tmp_path / "outer/inner"
    inner.mkdir(parents=True)
    if wrong == "owner":
        os.chown(inner, NOBODY, NOBODY)
    elif wrong == "link":
        inner.rename(tmp_path / "elsewhere")
        inner.symlink_to(tmp_path / "elsewhere")
    else:
        inner.parent.chmod(0o775 if wrong == "group" else 0o757)
    blamed = inner.parent if wrong in ("group", "others") else inner
    with pytest.raises(OSError, match=f"/{blamed.name}'") as caught:
        files.open_own_directory(str(inner), 2, 0o700)
    assert caught.value.filename == str(blamed)
    with pytest.raises(FileNotFoundError):
        files.open_own_directory(str(tmp_path / "none/inner"), 2)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """bin/python -> ../lib/current/python, where lib/current -> lib/3.11: a way of two links."""
    real = tmp_path / "lib/3.11/python"
    real.parent.mkdir(parents=True)
    real.write_text("")
    (tmp_path / "lib/current").symlink_to("3.11")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to("../lib/./current/python")
    return tmp_path / "bin/python"


def test_what_only_root_can_change(program: Path) -> None:
    assert list(files.changeable_by_others(str(program))) == []


WRONG = ["bin", "bin/python", "lib", "lib/current", "lib/3.11", "lib/3.11/python"]


@pytest.mark.parametrize("part", WRONG)
@pytest.mark.parametrize("how", ["owner", "group", "others"])
def test_every_part_of_the_way_counts(program: Path, tmp_path: Path, part: str, how: str) -> None:
    place = tmp_path / part
    if how == "owner":
        os.chown(place, NOBODY, NOBODY, follow_symlinks=False)
    elif not place.is_symlink():
        place.chmod(0o775 if how == "group" else 0o757)
    else:
        return  # a link has no mode
    (found,) = set(files.changeable_by_others(str(program)))
    assert found.startswith(f"{place} belongs to user {NOBODY if how == 'owner' else 0} with mode")
    assert list(files.changeable_by_others(str(program), owners=(0, NOBODY))) == (
        [] if how == "owner" else [found]
    )


def test_where_only_the_owner_may_remove(program: Path, tmp_path: Path) -> None:
    (tmp_path / "lib").chmod(0o1777)  # as /tmp
    assert list(files.changeable_by_others(str(program))) == []
    (tmp_path / "lib/3.11/python").chmod(0o1757)  # means nothing for a file
    assert len(list(files.changeable_by_others(str(program)))) == 1


def test_links_stay_in_their_root(tmp_path: Path) -> None:
    (tmp_path / "usr/lib").mkdir(parents=True)
    (tmp_path / "usr/lib/file").write_text("")
    (tmp_path / "lib").symlink_to("/usr/lib")
    (tmp_path / "up").symlink_to("../../../../../../../../usr/lib")
    (tmp_path / "usr/lib").chmod(0o777)
    for name in ("lib", "up"):
        found = list(files.changeable_by_others(f"/{name}/file", str(tmp_path)))
        assert found == ["/usr/lib belongs to user 0 with mode 0777"]
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels"):
        list(files.changeable_by_others("/loop/file", str(tmp_path)))
    with pytest.raises(FileNotFoundError):
        list(files.changeable_by_others("/usr/none", str(tmp_path)))


def test_a_directory_that_another_makes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As keepers of several ranks do that are started at once."""
    real = os.mkdir

    def mkdir(path: str, mode: int) -> None:
        real(path, mode)
        real(path, mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", mkdir)
        files.make_directories(str(tmp_path / "one/two"), 0o700)
    assert (tmp_path / "one/two").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        files.make_directories(str(tmp_path / "file"), 0o700)


def test_a_link_that_another_puts_in_its_place_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By who may write where the directory is made: root would change the mode of any other."""
    (tmp_path / "other").mkdir(mode=0o755)
    real = os.mkdir

    def mkdir(path: str, mode: int) -> None:
        real(path, mode)
        os.rmdir(path)
        os.symlink(tmp_path / "other", path)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(NotADirectoryError):
        files.make_directories(str(tmp_path / "new"), 0o700)
    assert mode(tmp_path / "other") == 0o755
