# SPDX-License-Identifier: Apache-2.0
"""`gpustasis install` and `uninstall` as people call them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from gpustasis.errors import InstallError
from gpustasis.install import layout, record
from gpustasis.install.root import Root
from install.conftest import install_into, put
from install.tree import tree
from support.json_output import check_document

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


def test_a_base_spec_of_containerd_has_the_hook(gpustasis: Gpustasis, root: Path) -> None:
    spec = put(
        root, "/spec.json", '{"ociVersion": "1.2.0", "hooks": {"poststop": [{"path": "/x"}]}}'
    )
    said = gpustasis("containerd", "base-spec", spec, "--json").stdout
    made = check_document(said, "containerd base-spec")["spec"]
    ours = {"path": layout.HOOK, "args": ["oci-hook"], "timeout": 30}
    assert made == {
        "ociVersion": "1.2.0",
        "hooks": {"createRuntime": [ours], "poststop": [{"path": "/x"}, ours]},
    }
    spec.write_text(gpustasis("containerd", "base-spec", spec).stdout)
    assert json.loads(spec.read_text()) == made
    assert json.loads(gpustasis("containerd", "base-spec", spec).stdout) == made  # once is enough


# What has almost 1,000 can be read, and not always be written.
DEEP = (101, 984, 985, 986, 100_000)


def deep(levels: int) -> str:
    """A specification that has that many."""
    inner = "[" * (levels - 1) + "1" + "]" * (levels - 1)
    return f'{{"ociVersion": "1.2.0", "deep": {inner}}}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "it is no JSON"),
        *((deep(levels), "it is nested more than 100 levels deep") for levels in DEEP),
        ('{"hooks": {}}', "it is no container's specification: ociVersion is missing"),
        ('{"ociVersion": "1.2.0", "hooks": []}', "its hooks are not as the OCI runtime"),
        ('{"ociVersion": "1.2.0", "hooks": {"poststop": {}}}', "its hooks are not as the OCI"),
    ],
)
def test_what_is_no_base_spec_is_refused(
    gpustasis: Gpustasis, root: Path, text: str, said: str
) -> None:
    spec = put(root, "/spec.json", text)
    ended = gpustasis("containerd", "base-spec", spec)
    assert ended.returncode == 22 and f"{spec}: {said}" in ended.stderr and ended.stdout == ""


def test_a_base_spec_of_many_levels_is_one(gpustasis: Gpustasis, root: Path) -> None:
    spec = put(root, "/spec.json", deep(100))
    for words in ((), ("--json",)):
        ended = gpustasis("containerd", "base-spec", spec, *words)
        assert ended.returncode == 0 and layout.HOOK in ended.stdout


def test_a_hook_that_containerd_needs_is_not_removed(gpustasis: Gpustasis, root: Path) -> None:
    gpustasis("install", "--root", root)
    spec = put(root, "/etc/containerd/base.json", f'{{"path": "{layout.HOOK}"}}')
    put(root, "/etc/containerd/config.toml", f"# {layout.HOOK}")
    before = tree(root)
    for words in ((), ("--dry-run",)):
        ended = gpustasis("uninstall", "--root", root, *words)
        assert ended.returncode == 22
        assert f"/etc/containerd/base.json names {layout.HOOK}" in ended.stderr
        assert ended.stderr.endswith("nothing was changed\n")
    assert tree(root) == before
    spec.rename(root / "elsewhere.json")
    spec.symlink_to("/elsewhere.json")
    ended = gpustasis("uninstall", "--root", root)
    assert ended.returncode == 22
    assert "it cannot be told whether containerd needs" in ended.stderr
    spec.unlink()
    assert gpustasis("uninstall", "--root", root).returncode == 0


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


def as_nobody(code: str) -> subprocess.CompletedProcess[str]:
    """Run the code as nobody. The package may lie where nobody may look: it is imported before."""
    before = (
        "import os, sys\nfrom gpustasis import cli\n"
        "for name in ('install', 'uninstall', 'doctor'): cli.cli.get_command(None, name)\n"
        "import gpustasis.install.installation, gpustasis.text\n"
        "from gpustasis.install import layout\n"
        "files, lines, unsafe = layout.files(sys.executable), layout.lines(), []\n"
        "layout.files, layout.lines = lambda python: files, lambda: lines\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", before + code], capture_output=True, text=True, check=False
    )


def call(*words: object) -> str:
    return f"sys.argv[1:] = {[str(word) for word in words]!r}\ncli.main()\n"


def test_an_ordinary_user_can_look(root: Path, gpustasis: Gpustasis) -> None:
    for place in (root, *root.parents[:-2]):
        place.chmod(place.stat().st_mode | 0o755)
    dry = as_nobody(call("install", "--root", root, "--dry-run"))
    assert dry.returncode == 0, dry.stderr
    assert f"create     {layout.PLUGIN}" in dry.stdout
    assert gpustasis("install", "--root", root).returncode == 0
    before = tree(root)
    for command in ("install", "uninstall"):  # its record is root's alone
        dry = as_nobody(call(command, "--root", root, "--dry-run"))
        assert dry.returncode == 22
        assert dry.stderr == (
            f"gpustasis: cannot read {record.RECORD}: Permission denied; run it as root\n"
        )
    assert tree(root) == before


def test_a_file_that_an_ordinary_user_cannot_read(root: Path) -> None:
    for place in (root, *root.parents[:-2]):
        place.chmod(place.stat().st_mode | 0o755)
    put(root, "/etc/criu/runc.conf", "link-remap\n").chmod(0o600)
    dry = as_nobody(call("install", "--root", root, "--dry-run"))
    assert dry.returncode == 22
    assert "cannot read /etc/criu/runc.conf: Permission denied; run it as root" in dry.stderr
    assert "Traceback" not in dry.stderr


def test_names_and_lines_that_are_no_utf_8(gpustasis: Gpustasis, root: Path) -> None:
    put(root, "/etc/criu/runc.conf", b"ghost-limit \xff1G\n")
    done = gpustasis("install", "--root", root)
    assert done.returncode == 0, done.stderr
    assert r"ghost-limit \xff1G in line 1: yours counts" in done.stdout


def fake_python(place: Path) -> Path:
    """A Python that only root can change, in a place that the test can spoil."""
    place.mkdir(parents=True)
    (place / "python3").symlink_to(sys.executable)
    return place / "python3"


UNSAFE = {
    "the directory": lambda place: place.chmod(0o777),
    "the directory above": lambda place: place.parent.chmod(0o775),
    "the owner of the directory": lambda place: os.chown(place, 65534, 0),
    "the owner of the link": lambda place: os.chown(
        place / "python3", 65534, 0, follow_symlinks=False
    ),
}


@pytest.mark.parametrize("how", UNSAFE)
def test_an_interpreter_that_others_can_change(tmp_path: Path, how: str) -> None:
    """Looked at on this host, where nothing is installed by a dry run."""
    python = fake_python(tmp_path / "opt/bin")
    with Root(Path("/"), alone=False) as host:
        assert list(layout.unsafe_hook(host, str(python))) == []
        UNSAFE[how](python.parent)
        (found,) = layout.unsafe_hook(host, str(python))
    assert str(tmp_path / "opt") in found
    assert f"others than root could change it, and {layout.HOOK} runs it as root" in found


@pytest.mark.parametrize("part", ["", "/_core.so", "/image", "/image/directory.py", "/link"])
def test_a_package_that_others_can_change(
    root: Path, monkeypatch: pytest.MonkeyPatch, gpustasis: Gpustasis, part: str
) -> None:
    """The extension module is one of its files."""
    package = root / "opt/packages/gpustasis"
    (package / "image").mkdir(parents=True)
    for name in ("_core.so", "image/directory.py"):
        (package / name).write_text("")
    (package / "link").symlink_to("image")
    monkeypatch.setattr(layout, "packages", lambda: "/opt/packages")
    assert install_into(root)[layout.HOOK].action == "create"
    before = tree(root)
    os.chown(f"{package}{part}", 65534, 65534, follow_symlinks=False)
    with pytest.raises(InstallError) as caught:
        install_into(root)
    assert f"/opt/packages/gpustasis{part} belongs to user 65534" in str(caught.value)
    assert str(caught.value).endswith("nothing was changed")
    os.chown(f"{package}{part}", 0, 0, follow_symlinks=False)
    assert tree(root) == before


def test_the_command_refuses_it(gpustasis: Gpustasis, tmp_path: Path) -> None:
    python = fake_python(tmp_path / "opt/bin")
    words = ("install", "--dry-run", "--python", python)
    first = gpustasis(*words)
    python.parent.chmod(0o777)
    ended = gpustasis(*words)
    assert ended.returncode == 22
    assert f"{python.parent} belongs to user 0 with mode 0777: others than root" in ended.stderr
    assert str(python.parent) not in first.stderr


@pytest.mark.parametrize("python", ["/bin/false", "/bin/echo"])
def test_what_is_no_interpreter(gpustasis: Gpustasis, python: str) -> None:
    ended = gpustasis("install", "--dry-run", "--python", python)
    assert ended.returncode == 22
    assert f"{python} cannot be the hook's interpreter: exit" in ended.stderr


@pytest.mark.parametrize("command", ["install", "uninstall"])
def test_help(gpustasis: Gpustasis, command: str) -> None:
    ended = gpustasis(command, "--help")
    assert ended.returncode == 0
    assert "--root DIR" in ended.stdout
    assert "--dry-run" in ended.stdout
