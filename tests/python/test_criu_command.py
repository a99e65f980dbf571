# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from gpustasis.criu.run import (
    Dump,
    Restore,
    dump_arguments,
    plugin_environment,
    restore_arguments,
)

V4_1, V4_3 = (4, 1, 1), (4, 3)
IMAGES, LOG, PLUGIN = Path("/images"), Path("/log/dump.log"), Path("/lib/plugin")
CONFIG = Path("/etc/config.toml")


def dump(**changes: object) -> Dump:
    values = {"images": IMAGES, "log": LOG, "plugin_dir": PLUGIN, "pid": 42} | changes
    return Dump(**values)  # type: ignore[arg-type]


def restore(**changes: object) -> Restore:
    values = {"images": IMAGES, "log": LOG, "plugin_dir": PLUGIN, "pidfile": Path("/pid")} | changes
    return Restore(**values)  # type: ignore[arg-type]


def pairs(arguments: list[str]) -> set[tuple[str, str]]:
    return set(itertools.pairwise(arguments))


def test_a_dump_names_tree_images_plugin_and_log() -> None:
    arguments = dump_arguments(dump(), V4_1)
    assert arguments[0] == "dump"
    assert pairs(arguments) >= {
        ("--tree", "42"),
        ("--images-dir", "/images"),
        ("--libdir", "/lib/plugin"),
        ("--log-file", "/log/dump.log"),
    }
    assert "-v4" in arguments


@pytest.mark.parametrize(
    ("field", "option"),
    [
        ("leave_running", "--leave-running"),
        ("leave_stopped", "--leave-stopped"),
        ("shell_job", "--shell-job"),
    ],
)
def test_a_switch_is_there_only_when_asked_for(field: str, option: str) -> None:
    assert option in dump_arguments(dump(**{field: True}), V4_1)
    assert option not in dump_arguments(dump(), V4_1)


def test_running_and_stopped_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="both"):
        dump_arguments(dump(leave_running=True, leave_stopped=True), V4_1)


def test_a_restore_writes_its_pid_and_detaches_unless_told() -> None:
    arguments = restore_arguments(restore(), V4_1)
    assert arguments[0] == "restore"
    assert ("--pidfile", "/pid") in pairs(arguments)
    assert "--restore-detached" in arguments
    assert "--restore-detached" not in restore_arguments(restore(detached=False), V4_1)


def test_work_dir_and_further_arguments_are_passed_on_last() -> None:
    arguments = dump_arguments(dump(work=Path("/w"), extra=("--tcp-established", "-j")), V4_1)
    assert ("--work-dir", "/w") in pairs(arguments)
    assert arguments[-2:] == ["--tcp-established", "-j"]


def test_the_configuration_goes_by_option_where_criu_has_it_else_by_environment() -> None:
    option = f"--plugin-option=cuda_plugin.config={CONFIG}"
    assert option in dump_arguments(dump(config=CONFIG), V4_3)
    assert plugin_environment(CONFIG, V4_3) == {}
    assert not any("plugin-option" in word for word in dump_arguments(dump(config=CONFIG), V4_1))
    assert plugin_environment(CONFIG, V4_1) == {"GPUSTASIS_CONFIG": str(CONFIG)}


@pytest.mark.parametrize("version", [V4_1, V4_3])
def test_without_a_configuration_nothing_is_said_of_it(version: tuple[int, ...]) -> None:
    assert plugin_environment(None, version) == {}
    assert not any("plugin-option" in word for word in restore_arguments(restore(), version))
