# SPDX-License-Identifier: Apache-2.0
"""Which control groups are a container's own: no others are thawed."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from gpustasis.errors import EngineError
from gpustasis.runtimes import freezer

ID = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4


class Host:
    """Control groups, as files."""

    def __init__(self, place: Path) -> None:
        self.groups = place / "cgroup"
        self.groups.mkdir()

    def group(self, path: str, *frozen: str, version: int = 1) -> None:
        """frozen: groups on the way there that are frozen."""
        base = self.groups / "freezer" if version == 1 else self.groups
        asks, changes = (
            ("freezer.self_freezing", "freezer.state")
            if version == 1
            else ("cgroup.freeze", "cgroup.freeze")
        )
        at = base
        for part in path.strip("/").split("/"):
            at /= part
            at.mkdir(parents=True, exist_ok=True)
            inside = "/" + str(at.relative_to(base))
            (at / changes).write_text("")
            (at / asks).write_text("1\n" if inside in frozen else "0\n")

    def frozen(self) -> list[str]:
        return [str(group.relative_to(self.groups)) for group in freezer.frozen_groups(ID)]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host(tmp_path)
    monkeypatch.setattr(freezer, "GROUPS", made.groups)
    return made


@pytest.mark.parametrize(
    "name", [f"crio-{ID}", f"crio-{ID}.scope", ID, f"cri-containerd-{ID}.scope"]
)
@pytest.mark.parametrize("version", [1, 2])
def test_a_paused_container(host: Host, name: str, version: int) -> None:
    path = f"/kubepods/pod1/{name}"
    host.group(path, path, version=version)
    (group,) = freezer.frozen_groups(ID)
    assert group.name == name
    freezer.thaw(group)
    changed = (group / ("freezer.state" if version == 1 else "cgroup.freeze")).read_text()
    assert changed == ("THAWED" if version == 1 else "0")


def test_a_group_that_goes_meanwhile(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is open by then. Nothing stands still in it; any other error is one."""
    path = f"/kubepods/crio-{ID}"
    host.group(path, path)
    (group,) = freezer.frozen_groups(ID)
    for code in (errno.ENODEV, errno.EIO):

        def fail(*_: object, code: int = code) -> str:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(Path, "read_text", fail)
        monkeypatch.setattr(Path, "write_text", fail)
        for ask in (freezer.is_frozen, freezer.thaw):
            with nullcontext() if code == errno.ENODEV else pytest.raises(EngineError):
                assert not ask(group)


def test_crun_puts_tasks_one_group_below(host: Host) -> None:
    path = f"/kubepods/crio-{ID}/container"
    host.group(path, path)
    assert host.frozen() == [f"freezer{path}"]


def test_what_a_container_has_frozen_within_itself_stays(host: Host) -> None:
    path = f"/kubepods/crio-{ID}/nested"
    host.group(path, path)
    assert host.frozen() == []


def test_a_group_that_another_container_has_made_is_not_meant(host: Host) -> None:
    host.group(f"/kubepods/crio-{ID}")
    hostile = f"/kubepods/crio-{OTHER}/crio-{ID}.scope"
    host.group(hostile, hostile)
    assert host.frozen() == []


def test_the_monitor_of_a_container_is_not_it(host: Host) -> None:
    host.group(f"/kubepods/crio-{ID}")
    host.group(f"/crio-conmon-{ID}.scope", f"/crio-conmon-{ID}.scope")
    assert host.frozen() == []


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_that_another_user_has_made_is_not_meant(host: Host, version: int) -> None:
    """Where he may, as below his session. A container's own may belong to its user; not to freeze
    it."""
    path, own = f"/user.slice/crio-{ID}.scope", f"/kubepods/crio-{OTHER}.scope"
    host.group(path, path, version=version)
    host.group(own, version=version)
    base = host.groups / ("freezer" if version == 1 else "")
    made = base / path.strip("/")
    for entry in (made, *made.iterdir(), base / own.strip("/")):
        os.chown(entry, 65534, 65534)
    assert freezer.groups_by_container() == {OTHER: [base / own.strip("/")]}


def test_all_containers_at_once(host: Host) -> None:
    host.group(f"/kubepods/crio-{ID}")
    host.group(f"/kubepods/crio-{OTHER}/container")
    host.group(f"/kubepods/crio-{OTHER}/container/nested-{ID}")
    host.group("/system.slice/crio.service")
    below = host.groups / "freezer/kubepods"
    assert freezer.groups_by_container() == {
        ID: [below / f"crio-{ID}"],
        OTHER: [below / f"crio-{OTHER}", below / f"crio-{OTHER}/container"],
    }


def test_a_container_that_is_not_seen_from_here_is_an_error(host: Host) -> None:
    host.group(f"/kubepods/crio-{OTHER}", f"/kubepods/crio-{OTHER}")
    with pytest.raises(EngineError, match="cannot be told from here"):
        freezer.frozen_groups(ID)
    with pytest.raises(EngineError, match="cannot be told"):
        freezer.frozen_groups("")
