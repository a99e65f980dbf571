# SPDX-License-Identifier: Apache-2.0
"""A tree with gpustasis and its Python is put into a root, and taken off again."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpustasis.errors import InstallError
from gpustasis.install import bundle, layout
from gpustasis.install.change import Action, Change
from gpustasis.install.installation import install
from gpustasis.install.root import Root
from install.conftest import put, uninstall_from
from install.tree import contents, copy, dies_at, tree

PLACE = layout.BUNDLE
OLD = {"bin/python3": b"a Python", "lib/module.py": b"1", "packages/gpustasis/cli/a.py": b"2"}
NEW = {"bin/python3": b"a newer Python", "lib/deep/er/module.py": b"1"}


@pytest.fixture(autouse=True)
def some_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    files = tuple(
        layout.File(path, b"#!a command\n", 0o755, layout.Kind.PROGRAM)
        for path in layout.COMMAND_PATHS
    )
    monkeypatch.setattr(layout, "commands", lambda: files)


@pytest.fixture
def make(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Have this program run from a tree with these files, listed as packaging/bundle.py does it."""
    spec = importlib.util.spec_from_file_location("maker", repository / "packaging/bundle.py")
    assert spec is not None and spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)

    def make(files: dict[str, bytes], version: str = "1.0") -> bundle.Bundle:
        source = tmp_path / f"source-{version}"
        text = f'__version__ = "{version}"\n'.encode()
        for name, data in {**files, "packages/gpustasis/__init__.py": text}.items():
            put(source, name, data).chmod(0o755 if name.startswith("bin") else 0o644)
        maker.list_files(source)
        monkeypatch.setattr(bundle, "SOURCE", source)
        return bundle.parse((source / bundle.LIST).read_bytes())

    return make


def install_tree(
    directory: Path, wanted: bundle.Bundle | None, *, dry_run: bool = False
) -> dict[str, Change]:
    """What was done, by path."""
    done: dict[str, Change] = {}
    with Root(directory) as root:
        tell = lambda change: done.setdefault(change.path, change)  # noqa: E731
        install(root, "1.0", sys.executable, tell, dry_run, wanted)
    return done


def there(root: Path) -> dict[str, bytes]:
    """The tree's files in the root, without list and version."""
    place = root / PLACE[1:]
    found = {
        str(path.relative_to(place)): path.read_bytes()
        for path in place.rglob("*")
        if path.is_file()
    }
    del found["packages/gpustasis/__init__.py"], found[bundle.LIST]
    return found


def test_it_comes_and_goes(root: Path, make: Callable[..., bundle.Bundle]) -> None:
    put(root, "/opt/other/file", "somebody's")
    before = tree(root)
    wanted = make(OLD)
    assert install_tree(root, wanted, dry_run=True)[PLACE].action is Action.CREATE
    assert tree(root) == before
    assert install_tree(root, wanted)[PLACE].action is Action.CREATE
    assert there(root) == OLD
    assert (root / "opt/gpustasis/bin/python3").stat().st_mode & 0o777 == 0o755
    assert (root / "opt/gpustasis/lib/module.py").stat().st_mode & 0o777 == 0o644
    assert (root / "usr/local/bin/gpustasis").read_bytes() == b"#!a command\n"
    again = install_tree(root, wanted)
    assert {change.action for change in again.values()} == {Action.UNCHANGED, Action.SKIP}
    done = uninstall_from(root)
    assert done[PLACE].action is Action.REMOVE
    assert tree(root) == before


def test_directories_above_it_that_were_made_go_too(
    root: Path, make: Callable[..., bundle.Bundle]
) -> None:
    install_tree(root, make(OLD))
    uninstall_from(root)
    assert tree(root) == {}


def test_an_upgrade(root: Path, make: Callable[..., bundle.Bundle]) -> None:
    install_tree(root, make(OLD))
    (root / "opt/gpustasis/lib/module.py").write_text("changed")
    done = install_tree(root, make(NEW, "2.0"))
    assert done[PLACE].action is Action.REPLACE
    assert done[PLACE].note == "gpustasis 1.0 with 2.0"
    assert there(root) == NEW
    assert os.listdir(root / "opt") == ["gpustasis"]
    uninstall_from(root)
    assert tree(root) == {}


@pytest.mark.parametrize("harm", ["changed", "missing", "mode", "owner", "directory"])
def test_what_was_harmed_is_put_right(
    root: Path, make: Callable[..., bundle.Bundle], harm: str
) -> None:
    wanted = make(OLD)
    install_tree(root, wanted)
    place = root / "opt/gpustasis/lib/module.py"
    before = contents(root)
    if harm == "changed":
        place.write_text("other")
    elif harm == "missing":
        place.unlink()
    elif harm == "mode":
        place.chmod(0o666)
    elif harm == "owner":
        os.chown(place, 1000, 1000)
    else:
        place.parent.chmod(0o777)
    assert contents(root) != before
    assert install_tree(root, wanted)[PLACE].action is Action.REPLACE
    assert contents(root) == before


def test_a_part_of_somebody_else_is_not_built_on(
    root: Path, make: Callable[..., bundle.Bundle]
) -> None:
    """Whoever may write to /opt has put it there beforehand."""
    (root / "srv").mkdir()
    part = root / "opt/.gpustasis.gpustasis-part"
    for make_part in (part.mkdir, lambda: part.symlink_to("/srv"), part.touch):
        (root / "opt").mkdir(exist_ok=True)
        make_part()
        os.chown(part, 1000, 1000, follow_symlinks=False)
        install_tree(root, make(OLD))
        assert (root / "opt/gpustasis").stat().st_uid == 0
        assert os.listdir(root / "opt") == ["gpustasis"]
        assert not os.listdir(root / "srv")
        uninstall_from(root)


def test_too_little_room(
    root: Path, make: Callable[..., bundle.Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "_SPARE", 1 << 60)
    with pytest.raises(InstallError, match=r"/opt/gpustasis needs \d+ MiB, and \d+ MiB are free"):
        install_tree(root, make(OLD))
    assert tree(root) == {}


def test_a_copy_that_fails_leaves_nothing(
    root: Path, make: Callable[..., bundle.Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = make(OLD)

    def fail(self: Root, path: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Root, "sync", fail)
    with pytest.raises(InstallError, match="No space left"):
        install_tree(root, wanted)
    assert not os.listdir(root / "opt")
    uninstall_from(root)
    assert tree(root) == {}


def test_a_record_that_knows_of_no_tree(root: Path, make: Callable[..., bundle.Bundle]) -> None:
    """As earlier versions wrote it."""
    install_tree(root, None)
    place = root / "var/lib/gpustasis/install.json"
    written = json.loads(place.read_text())
    del written["bundle"]
    place.write_text(json.dumps(written))
    install_tree(root, make(OLD))
    assert there(root) == OLD
    uninstall_from(root)
    assert tree(root) == {}


def test_without_the_tree_afterwards(root: Path, make: Callable[..., bundle.Bundle]) -> None:
    """As when it is run on the host itself."""
    install_tree(root, make(OLD))
    before = tree(root)
    done = install_tree(root, None)
    assert PLACE not in done
    assert tree(root) == before
    uninstall_from(root)
    assert tree(root) == {}


def test_somebody_s_own_file_stops_an_upgrade(
    root: Path, make: Callable[..., bundle.Bundle]
) -> None:
    install_tree(root, make(OLD))
    put(root, f"{PLACE}/lib/notes", "mine")
    (root / "opt/gpustasis/lib/link").symlink_to("/etc")
    before = tree(root)
    with pytest.raises(InstallError, match=r"holds lib/link, lib/notes, which gpustasis has not"):
        install_tree(root, make(NEW, "2.0"))
    assert tree(root) == before


def test_uninstall_leaves_a_tree_with_what_is_not_ours(
    root: Path, make: Callable[..., bundle.Bundle]
) -> None:
    install_tree(root, make(OLD))
    put(root, f"{PLACE}/lib/notes", "mine")
    (root / "opt/gpustasis/empty").mkdir()
    (root / "opt/gpustasis/bin/python3").write_text("changed")
    before = tree(root / "opt")
    done = uninstall_from(root)
    assert done[PLACE].action is Action.KEEP
    assert done[PLACE].note.startswith("bin/python3, empty, lib/notes: not ours, or changed since")
    assert tree(root / "opt") == before


@pytest.mark.parametrize("what", ["a directory", "a file", "a link to another", "a link to ours"])
def test_another_s_tree_is_refused(
    root: Path, make: Callable[..., bundle.Bundle], what: str
) -> None:
    if what == "a directory":
        put(root, f"{PLACE}/bin/python3", "a virtual environment's")
    elif what == "a file":
        put(root, PLACE, "")
    elif what == "a link to another":
        put(root, "/srv/theirs/bin/python3", "")
        (root / "opt").mkdir()
        (root / "opt/gpustasis").symlink_to("/srv/theirs")
    else:
        install_tree(root, make(OLD))
        (root / "opt/gpustasis").rename(root / "opt/moved")
        (root / "opt/gpustasis").symlink_to("moved")
    before = tree(root)
    with pytest.raises(InstallError, match="is there already, and no installation by this command"):
        install_tree(root, make(OLD))
    assert tree(root) == before


def test_a_list_that_was_changed_removes_nothing(
    root: Path, make: Callable[..., bundle.Bundle]
) -> None:
    """What it names could be anything."""
    install_tree(root, make(OLD))
    (root / "opt/gpustasis/files.json").write_text(
        json.dumps({"gpustasis": "1.0", "files": {"lib/module.py": ["644", "0" * 64]}})
    )
    before = tree(root / "opt")
    done = uninstall_from(root)
    assert done[PLACE].action is Action.KEEP
    assert tree(root / "opt") == before


@pytest.mark.parametrize(
    "files",
    [
        {"../x": ["644", "0" * 64]},
        {"/etc/passwd": ["644", "0" * 64]},
        {"a//b": ["644", "0" * 64]},
        {"a/./b": ["644", "0" * 64]},
        {"": ["644", "0" * 64]},
        {"a\0b": ["644", "0" * 64]},
        {"a": ["4755", "0" * 64]},
        {"a": ["644", "0"]},
        {"a": ["644", None]},
        {"a": "644"},
        [],
        None,
    ],
)
def test_a_hostile_list(files: object) -> None:
    with pytest.raises(InstallError, match=r"files\.json of /opt/gpustasis is damaged"):
        bundle.parse(json.dumps({"gpustasis": "1", "files": files}).encode())


@pytest.mark.parametrize("text", ["", "[]", "{", '{"gpustasis": 1, "files": {}}', "[" * 100_000])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(InstallError, match="is damaged"):
        bundle.parse(text.encode())


def test_a_source_that_is_not_as_listed(root: Path, make: Callable[..., bundle.Bundle]) -> None:
    wanted = make(OLD)
    (bundle.SOURCE / "lib/module.py").write_text("other")
    with pytest.raises(InstallError, match=r"lib/module\.py was changed since it was made"):
        install_tree(root, wanted)
    assert not (root / "opt/gpustasis").exists()
    uninstall_from(root)
    assert tree(root) == {}


def test_only_a_tree_of_its_own_is_put_there(root: Path) -> None:
    with Root(root) as opened:
        assert bundle.own(opened) is None


def test_death_at_any_moment(
    root: Path, make: Callable[..., bundle.Bundle], tmp_path: Path
) -> None:
    """At each the tree is not there, or one of both is, whole; and all can be undone."""
    put(root, "/etc/criu/default.conf", "tcp-established\n")
    before = contents(root)
    old = make(OLD)
    start = copy(root, tmp_path / "old")
    install_tree(start, old)
    new = make(NEW, "2.0")
    turns = {"upgrade": (start, new), "install": (root, new), "uninstall": (start, None)}
    for name, (origin, wanted) in turns.items():
        turn = 0
        while True:
            turn += 1
            killed = copy(origin, tmp_path / "killed")

            def work(at: Path = killed, wanted: bundle.Bundle | None = wanted) -> object:
                return install_tree(at, wanted) if wanted else uninstall_from(at)

            died = dies_at(turn, work)
            place = killed / PLACE[1:]
            assert name != "upgrade" or place.exists()  # one takes the other's place
            if name != "uninstall" and place.exists():
                assert there(killed) in ((OLD, NEW) if name == "upgrade" else (NEW,)), turn
            if name != "uninstall":
                again = copy(killed, tmp_path / "again")
                install_tree(again, new)
                assert there(again) == NEW
                assert sorted(os.listdir(again / "opt")) == ["gpustasis"]
                shutil.rmtree(again)
            if (killed / "var/lib/gpustasis/install.json").exists():
                uninstall_from(killed)
            left = contents(killed)
            if died and left != before:
                install_tree(killed, new)
                uninstall_from(killed)
                left = contents(killed)
            assert left == before, f"{name}, {turn}"
            shutil.rmtree(killed)
            if not died:
                break
        assert turn > 20, name


@pytest.mark.parametrize(
    ("libc", "refused"),
    [(b"GLIBC_2.36\0GLIBC_2.9\0", False), (b"GLIBC_2.35\0", True), (None, True)],
)
def test_a_libc_that_cannot_load_the_plugin(
    root: Path,
    libc: bytes | None,
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """None: a link to libc-2.31.so."""
    plugins = tmp_path / "plugins"
    put(plugins, "cuda_plugin.so", b"GLIBC_2.2.5\0GLIBC_2.36\0GLIBC_2.17\0")
    monkeypatch.setenv("GPUSTASIS_PLUGIN_DIR", str(plugins))
    if libc is None:
        put(root, "/usr/lib64/libc-2.31.so", b"GLIBC_2.31\0")
        (root / "usr/lib64/libc.so.6").symlink_to("libc-2.31.so")
    else:
        put(root, "/usr/lib64/libc.so.6", libc)
    (root / "lib64").symlink_to("usr/lib64")
    if refused:
        with pytest.raises(
            InstallError, match=r"glibc 2\.3[35] or older, and the plugin needs 2\.36"
        ):
            install_tree(root, None)
        assert not (root / "var").exists()
    else:
        install_tree(root, None)
        assert (root / "var").exists()
