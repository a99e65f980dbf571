# SPDX-License-Identifier: Apache-2.0
"""What stands in the way of an installation is named, and nothing is changed."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpustasis.errors import InstallError
from gpustasis.install import layout, record
from install.conftest import install_into, put, uninstall_from
from install.tree import tree


def refused(root: Path, work: Callable[[Path], object] = install_into) -> str:
    """The error, after a look that nothing was changed."""
    before = tree(root)
    with pytest.raises(InstallError) as caught:
        work(root)
    assert tree(root) == before
    return str(caught.value)


def in_a_process(work: Callable[[], object]) -> str:
    """What InstallError said in a process of its own; empty: there was none."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 0
        try:
            work()
        except InstallError as exc:
            os.write(writing, str(exc).encode())
        except BaseException as exc:  # noqa: BLE001  # the process must end here
            os.write(writing, f"{type(exc).__name__}: {exc}".encode())
            status = 1
        os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0, said
    return said


@pytest.mark.parametrize("path", sorted(layout.BLOCK_PATHS))
@pytest.mark.parametrize("line", ["libdir /opt/plugins", "libdir=/opt/plugins"])
def test_another_libdir(root: Path, path: str, line: str) -> None:
    put(root, path, f"# mine\n\n{line}\n")
    said = refused(root)
    assert f"{path}, line 3: 'libdir /opt/plugins' is set already" in said
    assert layout.PLUGIN_DIRECTORY in said


def test_every_obstacle_is_named_at_once(root: Path) -> None:
    put(root, "/etc/criu/default.conf", "libdir /one\n")
    put(root, "/etc/criu/runc.conf", "timeout 1 2\n")
    put(root, "/usr/lib/gpustasis/criu/other.so", "")
    put(root, layout.HOOK_DEFINITION, "{}")
    said = refused(root)
    assert "default.conf, line 1: 'libdir /one'" in said
    assert "runc.conf, line 1: 'timeout 1 2': an option has one value" in said
    assert "holds other.so, which criu would load as well" in said
    assert f"{layout.HOOK_DEFINITION} is there already" in said


def test_options_of_the_administrator_count(root: Path) -> None:
    put(root, "/etc/criu/runc.conf", "ghost-limit 2G\nno-link-remap\n")
    done = install_into(root)
    assert done["/etc/criu/runc.conf"].note == (
        "ghost-limit 2G in line 1, no-link-remap in line 2: yours counts"
    )
    text = (root / "etc/criu/runc.conf").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines == ["ghost-limit 2G", "no-link-remap", f"libdir {layout.PLUGIN_DIRECTORY}"]


def test_a_new_crun_conf_would_hide_runc_conf(root: Path) -> None:
    put(root, "/etc/criu/runc.conf", "tcp-established\n")
    assert install_into(root)["/etc/criu/crun.conf"].action == "skip"
    assert not (root / "etc/criu/crun.conf").exists()
    put(root, "/etc/criu/crun.conf", "tcp-close\n")
    assert install_into(root)["/etc/criu/crun.conf"].action == "extend"
    uninstall_from(root)
    assert (root / "etc/criu/crun.conf").read_text() == "tcp-close\n"


def test_what_was_changed_since_is_left_and_named(root: Path) -> None:
    put(root, "/etc/criu/default.conf", "timeout 20")
    install_into(root)
    config = put(root, layout.CONFIG, "threads = 4\n")
    drop_in = put(root, layout.CRIO_DROP_IN, "# mine now\n")
    runc = root / "etc/criu/runc.conf"
    runc.write_text(runc.read_text().replace("512M", "1G"))
    default = root / "etc/criu/default.conf"
    default.write_text("# first\n" + default.read_text() + "# last\n")

    again = install_into(root)
    for path in (layout.CONFIG, layout.CRIO_DROP_IN, "/etc/criu/runc.conf"):
        assert again[path].action == "keep", path
    assert again["/etc/criu/default.conf"].action == "unchanged"

    done = uninstall_from(root)
    for path in (layout.CONFIG, layout.CRIO_DROP_IN, "/etc/criu/runc.conf"):
        assert done[path].action == "keep", path
        assert "changed since" in done[path].note
    assert config.read_text() == "threads = 4\n"
    assert drop_in.read_text() == "# mine now\n"
    assert "ghost-limit 1G" in runc.read_text()
    assert default.read_text() == "# first\ntimeout 20\n# last\n"
    assert not (root / "usr").exists()
    assert not (root / "var").exists()


def test_a_changed_program_is_put_right(root: Path) -> None:
    install_into(root)
    plugin, hook = root / layout.PLUGIN[1:], root / layout.HOOK[1:]
    plugin.write_bytes(b"garbage")
    hook.chmod(0o644)
    done = install_into(root)
    assert done[layout.PLUGIN].action == done[layout.HOOK].action == "replace"
    assert plugin.read_bytes() == b"a plugin"
    assert os.access(hook, os.X_OK)


def test_lines_without_a_record(root: Path) -> None:
    install_into(root)
    (root / record.RECORD[1:]).unlink()
    for path in sorted(layout.FILE_PATHS):
        (root / path[1:]).unlink()
    said = refused(root)
    assert "/etc/criu/default.conf, lines 1 to 9: lines of gpustasis that no record" in said


@pytest.mark.parametrize("text", ["# BEGIN gpustasis\n", "# END gpustasis\n# BEGIN gpustasis\n"])
def test_half_a_block(root: Path, text: str) -> None:
    put(root, "/etc/criu/runc.conf", text)
    assert "/etc/criu/runc.conf holds marks of gpustasis that do not make one" in refused(root)


def test_dry_run_does_nothing(root: Path) -> None:
    put(root, "/etc/criu/default.conf", "timeout 20")
    before = tree(root)
    planned = install_into(root, dry_run=True)
    assert tree(root) == before
    done = install_into(root)
    assert {p: c.action for p, c in planned.items()} == {p: c.action for p, c in done.items()}
    installed = tree(root)
    planned = uninstall_from(root, dry_run=True)
    assert tree(root) == installed
    done = uninstall_from(root)
    assert {p: c.action for p, c in planned.items()} == {p: c.action for p, c in done.items()}


@pytest.mark.parametrize("target", ["../../../..", "/", "../outside"])
def test_links_do_not_lead_out_of_the_root(root: Path, tmp_path: Path, target: str) -> None:
    """The root's "etc" leads where it would lead a process that lives there."""
    outside = tmp_path / "outside"
    (outside / "criu").mkdir(parents=True)
    put(outside, "/criu/default.conf", "timeout 3\n")
    (root / "outside").mkdir()
    (root / "etc").symlink_to(target)
    before, inside = tree(outside), tree(root)
    install_into(root)
    assert tree(outside) == before
    led = root / ("outside" if target == "../outside" else "")
    assert (led / "criu/runc.conf").is_file()
    uninstall_from(root)
    assert tree(outside) == before
    assert tree(root) == inside


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "dangling", "loop", "file"])
def test_something_else_in_a_place(root: Path, tmp_path: Path, kind: str) -> None:
    (root / "etc/criu").mkdir(parents=True)
    place = root / "etc/criu/runc.conf"
    secret = put(tmp_path, "secret", "timeout 1\n")
    if kind == "link":
        place.symlink_to(secret)
        expected = f"/etc/criu/runc.conf is a symbolic link to '{secret}'"
    elif kind == "fifo":
        os.mkfifo(place)
        expected = "/etc/criu/runc.conf is not a regular file"
    elif kind == "directory":
        place.mkdir()
        expected = "/etc/criu/runc.conf is not a regular file"
    elif kind == "dangling":
        (root / "usr").symlink_to("/nowhere/at/all")
        expected = "leads through a link to nowhere"
    elif kind == "loop":
        (root / "usr").symlink_to("usr")
        expected = "leads through too many links"
    else:
        (root / "usr").write_text("")
        expected = "'usr' is not a directory"
    assert expected in refused(root)
    assert secret.read_text() == "timeout 1\n"


def test_a_user_who_may_not(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root, "/etc/criu/default.conf", "timeout 20\n")
    for directory in ("usr", "var"):
        (root / directory).mkdir()
        os.chown(root / directory, 65534, 65534)
    os.chown(root, 65534, 65534)  # for the lock; /etc stays root's
    before = tree(root)
    # Only the root itself is looked at as somebody else: what is above it may be closed to them.
    monkeypatch.chdir(root)
    files = layout.files(sys.executable)
    monkeypatch.setattr(layout, "files", lambda python: files)
    lines = layout.lines()
    monkeypatch.setattr(layout, "lines", lambda: lines)

    def as_nobody(work: Callable[[Path], object]) -> str:
        def run() -> None:
            os.setgid(65534)
            os.setuid(65534)
            work(Path("."))

        return in_a_process(run)

    said = as_nobody(install_into)
    assert "cannot change /etc/c" in said
    assert "Permission denied; what was done until then is on record" in said
    assert (root / layout.PLUGIN[1:]).exists()
    assert as_nobody(uninstall_from) == ""
    assert tree(root) == before


def test_no_space_for_the_plugin(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "big/cuda_plugin.so", bytes(1 << 20))
    monkeypatch.setenv("GPUSTASIS_PLUGIN_DIR", str(tmp_path / "big"))
    before = tree(root)

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
        install_into(root)

    said = in_a_process(limited)
    assert f"cannot change {layout.PLUGIN}: File too large" in said
    uninstall_from(root)
    assert tree(root) == before


def damaged(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        raw = json.loads(path.read_text())
        change(raw)
        path.write_text(json.dumps(raw))

    return apply


RECORDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (lambda p: p.write_bytes(p.read_bytes()[:-9]), "is damaged"),
    "no text": (lambda p: p.write_bytes(b"\xff\x00"), "is damaged"),
    "nested": (lambda p: p.write_text("[" * 100_000), "is damaged"),
    "too large": (lambda p: p.write_bytes(bytes(1 << 19)), "bytes, at most"),
    "not an object": (lambda p: p.write_text("[]"), "is not an object"),
    "a later version": (damaged(lambda r: r.update(version=2)), "version 2"),
    "another's file": (damaged(lambda r: r["files"][0].update(path="/etc/passwd")), "/etc/passwd"),
    "a path upwards": (
        damaged(lambda r: r["files"][0].update(path="/etc/gpustasis/../passwd")),
        "installs no file",
    ),
    "a list as path": (damaged(lambda r: r["files"][0].update(path=[])), "is damaged"),
    "a directory": (damaged(lambda r: r["directories"].append("/home")), "makes no directory"),
    "the root": (damaged(lambda r: r["directories"].append("")), "makes no directory"),
    "a hash": (damaged(lambda r: r["files"][0].update(ours=["0" * 63])), "no SHA-256"),
    "a time": (
        damaged(lambda r: r["files"][-1].update(before={"sha256": "0" * 64, "mtime_ns": -1})),
        "out of range",
    ),
    "twice": (damaged(lambda r: r["files"].append(r["files"][0])), "stands twice"),
    "no files": (damaged(lambda r: r.pop("files")), "is damaged"),
    "writable": (lambda p: p.chmod(0o666), "others than user"),
    "owned by another": (lambda p: os.chown(p, 65534, 0), "others than user"),
    "a link": (lambda p: (p.rename(p.with_name("x")), p.symlink_to("x")), "symbolic link"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_an_unfit_record_is_refused(root: Path, name: str) -> None:
    damage, said = RECORDS[name]
    install_into(root)
    put(root, "/etc/passwd", "root\n")
    damage(root / record.RECORD[1:])
    assert said in refused(root, uninstall_from)
    assert said in refused(root)
