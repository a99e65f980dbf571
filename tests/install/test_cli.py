"""`gpustasis install` and `uninstall` as people call them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from gpustasis.install import layout
from install.conftest import put
from install.tree import tree

Gpustasis = Callable[..., CompletedProcess[str]]


def test_each_file_is_printed(gpustasis: Gpustasis, root: Path) -> None:
    put(root, "/etc/criu/default.conf", "log-pid\n")
    before = tree(root)
    dry = gpustasis("install", "--root", root, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert tree(root) == before
    done = gpustasis("install", "--root", root)
    assert done.stdout == dry.stdout
    lines = done.stdout.splitlines()
    for path in layout.FILE_PATHS | {"/etc/criu/runc.conf"}:
        assert f"create     {path}" in lines
    assert "extend     /etc/criu/default.conf" in lines
    assert f"note       {sys.executable} is not there, and {layout.HOOK} needs it" in done.stdout

    again = gpustasis("install", "--root", root)
    assert again.stdout.count("unchanged") == len(layout.FILE_PATHS) + 2
    undone = gpustasis("uninstall", "--root", root)
    assert "restore    /etc/criu/default.conf" in undone.stdout
    assert tree(root) == before
    assert gpustasis("uninstall", "--root", root).stdout == "nothing is installed there\n"


def test_plugins_that_criu_does_not_load_any_more_are_named(
    gpustasis: Gpustasis, root: Path
) -> None:
    put(root, "/usr/lib/criu/amdgpu_plugin.so", "")
    said = gpustasis("install", "--root", root).stdout
    assert "criu does not load amdgpu_plugin.so from /usr/lib/criu any more" in said


def test_obstacles_are_an_error(gpustasis: Gpustasis, root: Path) -> None:
    put(root, "/etc/criu/runc.conf", "libdir /elsewhere\n")
    ended = gpustasis("install", "--root", root)
    assert ended.returncode == 22
    assert ended.stderr.startswith("gpustasis: /etc/criu/runc.conf, line 1: 'libdir /elsewhere'")
    assert ended.stderr.endswith("nothing was changed\n")
    assert gpustasis("install", "--root", root / "none").returncode == 22


def test_the_host_itself_is_root_s(tmp_path: Path) -> None:
    """The package may lie where nobody may look: it is imported before the process is nobody."""
    code = (
        "import os\nfrom pathlib import Path\nfrom gpustasis.cli.install import require_rights\n"
        "from gpustasis.errors import UnsupportedError\nos.setuid(65534)\n"
        "require_rights(Path('/'), True)\n"
        f"require_rights(Path({str(tmp_path)!r}), False)\n"
        "try:\n    require_rights(Path('/'), False)\n"
        "except UnsupportedError as exc:\n    print(exc)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("run it as root")


def test_a_package_that_others_can_change(tmp_path: Path) -> None:
    package = tmp_path / "shared/lib/gpustasis"
    package.mkdir(parents=True)
    assert tmp_path / "shared" not in list(layout.writable_by_others(package))
    (tmp_path / "shared").chmod(0o777)
    assert next(layout.writable_by_others(package)) == tmp_path / "shared"
    (tmp_path / "shared").chmod(0o1777)  # as /tmp
    assert tmp_path / "shared" not in list(layout.writable_by_others(package))
    os.chown(package, 65534, 65534)
    assert next(layout.writable_by_others(package)) == package


@pytest.mark.parametrize("command", ["install", "uninstall"])
def test_help(gpustasis: Gpustasis, command: str) -> None:
    ended = gpustasis(command, "--help")
    assert ended.returncode == 0
    assert "--root DIR" in ended.stdout
    assert "--dry-run" in ended.stdout
