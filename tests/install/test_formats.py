# SPDX-License-Identifier: Apache-2.0
"""What is installed has the form that its readers document."""

from __future__ import annotations

import configparser
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gpustasis.agent import daemon
from gpustasis.criu.find import Criu
from gpustasis.criu.plugin import parse_options
from gpustasis.errors import CriuError
from gpustasis.install import layout
from gpustasis.install.layout import crun_advice
from install.conftest import install_into, put
from install.tree import tree

OCI_STAGES = {  # oci-hooks(5), and the stages of the OCI runtime specification
    *("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"),
}


def test_the_hook_definition(root: Path) -> None:
    """oci-hooks(5), version 1.0.0: both engines refuse a file with anything else in it."""
    install_into(root)
    place = root / layout.HOOK_DEFINITION[1:]
    assert place.name.endswith(".json")
    definition = json.loads(place.read_text())
    assert set(definition) == {"version", "hook", "when", "stages"}
    assert definition["version"] == "1.0.0"
    hook = definition["hook"]
    assert set(hook) <= {"path", "args", "env", "timeout"}
    program = root / hook["path"][1:]
    assert hook["path"].startswith("/")
    assert program.stat().st_mode & 0o7777 == 0o755
    assert isinstance(hook["timeout"], int)
    assert hook["timeout"] > 0
    assert set(definition["when"]) <= {"always", "annotations", "commands", "hasBindMounts"}
    assert definition["when"], "an empty one never matches"
    ((key, value),) = definition["when"]["annotations"].items()
    assert re.search(key, "io.gpustasis.compress")
    assert not re.search(key, "ioxgpustasis.compress")
    assert not re.search(key, "org.io.gpustasis.compress")
    assert re.search(value, "")
    assert definition["stages"] == ["createRuntime", "poststop"]
    assert set(definition["stages"]) <= OCI_STAGES


def test_the_hook_starts_where_it_was_made_for(root: Path) -> None:
    install_into(root)
    first, *rest = (root / layout.HOOK[1:]).read_text().splitlines()
    assert first == f"#!{sys.executable} -IBS"
    assert "from gpustasis.oci_hook import main" in rest
    place = rest[rest.index("import sys") + 2]
    code = f"import sys\n{place}\nimport gpustasis\nprint(gpustasis.__file__)"
    ended = subprocess.run(
        [sys.executable, "-IS", "-c", code], capture_output=True, text=True, check=True
    )
    assert Path(ended.stdout.strip()).parent.parent == Path(layout.packages())


def test_the_agent_starts_where_it_was_made_for(root: Path) -> None:
    install_into(root)
    program = root / layout.AGENT[1:]
    assert program.stat().st_mode & 0o7777 == 0o755
    words = [program, "--help"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert said.startswith("Usage: agent agent run [OPTIONS]") or "Be the agent" in said


def test_the_agent_s_unit(root: Path) -> None:
    """systemd.service(5): the agent says when it is ready, has time to end, and takes nothing along
    that holds memory of jobs."""
    install_into(root)
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((root / layout.UNIT[1:]).read_text())
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    service = unit["Service"]
    assert service["ExecStart"] == layout.AGENT
    assert service["Type"] == "notify"
    assert service["KillMode"] == "process"
    assert float(service["TimeoutStopSec"]) > daemon.STOP_S
    assert float(service["WatchdogSec"]) > 10


ODD_NAMES = [
    *(
        'with "quotes"',
        "it's",
        "two\nlines",
        "back\\slash\\n",
        "@PYTHON@",
        "@PACKAGES@",
        "not \udcff",
    ),
    '"); import os; os._exit(9); ("',
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_package_in_a_directory_of_any_name(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    packages = tmp_path / name
    (packages / "gpustasis").mkdir(parents=True)
    (packages / "gpustasis/oci_hook.py").write_text("def main():\n    return 7\n")
    monkeypatch.setattr(layout, "packages", lambda: str(packages))
    install_into(root)
    program = root / layout.HOOK[1:]
    ended = subprocess.run([program], capture_output=True, text=True, check=False)
    assert ended.returncode == 7, ended.stderr


@pytest.mark.parametrize("python", ["python3", "/usr/bin/python3 -X", "/" + "x" * 300, "/a\n/b"])
def test_an_interpreter_that_cannot_stand_in_a_first_line(python: str) -> None:
    with pytest.raises(Exception, match="cannot be the hook's interpreter"):
        layout.files(python)


def test_the_drop_in_of_crio(root: Path) -> None:
    """crio.conf.d(5) and crio.conf(5): TOML; a drop-in sets keys one by one."""
    install_into(root)
    text = (root / layout.CRIO_DROP_IN[1:]).read_text()
    assert tomllib.loads(text) == {"crio": {"runtime": {"enable_criu_support": True}}}
    shown = re.sub(r"^# (?=\[|container_level)", "", text, flags=re.MULTILINE)
    assert tomllib.loads(shown)["crio"]["checkpoint_restore"] == {
        "container_level_enabled": "checkpoint_restore"
    }


def test_every_key_is_in_the_configuration(root: Path, repository: Path) -> None:
    """With the default that the table in docs/operating.md gives."""
    install_into(root)
    text = (root / layout.CONFIG[1:]).read_text()
    assert tomllib.loads(text) == {}
    keys = tomllib.loads(re.sub(r"^#(?=[a-z_]+ = )", "", text, flags=re.MULTILINE))
    table = (repository / "docs/operating.md").read_text().split("## Configuration")[1]
    table = table.split("\n## ")[0]
    documented = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE))
    assert set(keys) == set(documented)
    for key, value in keys.items():
        if documented[key] != "none":
            assert f"`{json.dumps(value)}`" == documented[key], key


TEXTS = {
    "comments": "# a\n\n  # b\n\t\n",
    "value after a blank": "ghost-limit 100M\n",
    "value after =": "ghost-limit=100M\n",
    "no value": "link-remap\n",
    "a comment after a value": "ghost-limit 100M # enough\n",
    "quotes": 'lsm-profile "a b"\n',
    "no newline at the end": "link-remap",
    "a dash": "-link-remap\n",
    "dashes": "--link-remap\n",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_criu_reads_it_as_we_do(criu: Criu, tmp_path: Path, text: str) -> None:
    """criu ends with "unrecognized option" or so where we say that a line is none."""
    file = put(tmp_path, "criu.conf", text)
    argv = [*criu.command({}), "--config", str(file), "--version"]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    try:
        parse_options(text, "criu.conf")
    except CriuError:
        assert ended.returncode != 0, ended.stdout
    else:
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_criu_takes_what_is_installed(criu: Criu, root: Path) -> None:
    install_into(root)
    for name in ("default.conf", "runc.conf"):
        file = root / "etc/criu" / name
        argv = [*criu.command({}), "--config", str(file), "--version"]
        ended = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        options = {option.name: option.value for option in parse_options(file.read_text(), name)}
        assert options["libdir"] == layout.PLUGIN_DIRECTORY


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("timeout 1 2", "one value at most"),
        ('lsm-profile "a b', "quote is not closed"),
        ("--libdir /x", "options stand without dashes"),
        ("=x", "not the name of an option"),
    ],
)
def test_a_line_that_is_no_option(line: str, problem: str) -> None:
    with pytest.raises(CriuError, match=rf"x\.conf, line 2: .*{problem}"):
        parse_options(f"# first\n{line}\n", "x.conf")


def test_what_a_build_of_crun_cannot_do() -> None:
    assert list(crun_advice("/usr/bin/crun", b"... libcriu.so.2 ... /etc/criu/crun.conf ...")) == []
    (old,) = crun_advice("/usr/bin/crun", b"... libcriu.so.2 ...")
    assert "older than 1.26" in old
    (without,) = crun_advice("/usr/bin/crun", b"...")
    assert "built without CRIU" in without


def test_installing_changes_no_directory_but_by_adding(root: Path) -> None:
    put(root, "/etc/criu/runc.conf", "")
    (root / "etc").chmod(0o700)
    before = tree(root)
    install_into(root)
    after = tree(root)
    assert {name: after[name] for name in before if name != "etc/criu/runc.conf"} == {
        name: facts for name, facts in before.items() if name != "etc/criu/runc.conf"
    }
