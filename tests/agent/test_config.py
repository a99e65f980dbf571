# SPDX-License-Identifier: Apache-2.0
"""The agent's configuration: what it takes, what it refuses, and what the documentation says."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from gpustasis.agent.config import _KEYS, _TARGET_KEYS, Config, Target, load, parse
from gpustasis.agent.subjects import Subject
from gpustasis.errors import AgentError

WHOLE = """
store = "/data/agent"
users = [1000, "root"]
groups = ["root"]
concurrency = 2
memory_reserve = "512M"
http_port = 9464
http_socket = ""

[[target]]
name = "train"
pidfile = "/run/train.pid"
interval = "auto"
mtbf = "12h"
keep_last = 5
verify = true

[[target]]
name = "serve"
container = "podman:serve"
interval = "30m"
"""


def test_a_whole_one() -> None:
    found = parse(tomllib.loads(WHOLE))
    assert found.users == {0, 1000} and found.groups == {0}
    assert found.memory_reserve == 512 << 20 and found.http_socket is None
    train, serve = found.targets
    assert train.auto and train.interval_s is None and train.mtbf_s == 43200 and train.is_periodic
    assert serve.container == Subject(engine="podman", name="serve")
    assert serve.interval_s == 1800 and not serve.auto
    assert found.target("serve") is serve and found.target("none") is None


TARGET = '[[target]]\nname = "a"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no_such = 1", "there is no key 'no_such'"),
        ("concurrency = 0", "'concurrency' cannot be 0"),
        ("concurrency = true", "'concurrency' cannot be True"),
        ("queue = 100000", "from 1 to 1024"),
        ('disk_reserve = "lots"', "a size such as"),
        ("disk_reserve = 5", "a size such as"),
        ('store = "relative"', "an absolute path"),
        (f'socket = "/{"x" * 120}"', "at most 107 bytes"),
        ('users = ["no-such-user-here"]', "knows no 'no-such-user-here'"),
        ("users = [-1]", "neither a name nor a number"),
        ("users = [4294967295]", "neither a name nor a number"),
        ('users = "all"', "a list of names or numbers"),
        ("http_port = 70000", "from 0 to 65535"),
        ('cpu_memory = "theirs"', "one of criu, ours, auto"),
        ('tier = "tape"', "one of disk, ram"),
        ("drain_rate = 5", "a size such as"),
        ("target = 3", "no list of at most"),
        ('[[target]]\npidfile = "/a"', "a target has no 'name'"),
        ('[[target]]\nname = "../a"\npidfile = "/a"', "is no name of a target"),
        (TARGET, "needs one of 'pidfile' and 'container'"),
        (TARGET + 'pidfile = "/a"\ncontainer = "podman:b"', "needs one of"),
        (TARGET + 'container = "docker:b"', "ENGINE:NAME"),
        (TARGET + 'pidfile = "/a"\ninterval = "0s"', "not a number followed by"),
        (TARGET + 'pidfile = "/a"\ninterval = "soon"', "not a number followed by"),
        (TARGET + 'pidfile = "/a"\nkeep_last = 0', "target 'a': 'keep_last' cannot be 0"),
        (TARGET + 'pidfile = "/a"\nverify = 1', "true or false"),
        (TARGET + 'pidfile = "/a"\n' + TARGET + 'pidfile = "/b"', "target 'a' stands twice"),
    ],
)
def test_what_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(text)
    with pytest.raises(AgentError) as caught:
        load(path)
    assert said in str(caught.value) and str(path) in str(caught.value)


def test_a_file_that_others_could_change_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text("")
    assert load(path) == Config()
    path.chmod(0o664)
    with pytest.raises(AgentError, match="others than root could change it"):
        load(path)
    path.chmod(0o600)
    os.chown(path, 65534, 65534)
    with pytest.raises(AgentError, match="belongs to user 65534"):
        load(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(AgentError, match="cannot read"):
        load(path)
    with pytest.raises(AgentError, match="there is no configuration"):
        load(tmp_path / "none")


def table(repository: Path, title: str) -> dict[str, str]:
    """Key and default of the table below a title of docs/agent.md."""
    text = (repository / "docs/agent.md").read_text().partition(f"### {title}\n")[2]
    rows = re.findall(r"^\| `([a-z_]+)` \|([^|]*)\|", text.partition("\n##")[0], re.MULTILINE)
    return {key: default.strip() for key, default in rows}


def test_the_documentation_has_every_key_and_its_default(repository: Path) -> None:
    found = table(repository, "Keys")
    assert set(found) == set(_KEYS)
    for field in fields(Config):
        if field.name != "targets":
            assert found[field.name] == shown(field.name, getattr(Config(), field.name))
    found = table(repository, "Targets")
    assert set(found) == {"name", *_TARGET_KEYS}
    default = Target(name="x")
    assert found["keep_last"] == f"`{default.keep_last}`"
    assert found["max_chain"] == f"`{default.max_chain}`"
    assert found["mtbf"] == f'`"{default.mtbf_s / 3600:.0f}h"`'
    assert found["verify"] == "`false`"


def shown(key: str, value: Any) -> str:
    if value in (None, "", ()):
        return "none"
    if isinstance(value, float):
        return f'`"{value:g}s"`'
    if isinstance(value, frozenset):
        return "`[]`"
    if key == "drain_rate":  # a size, as the others, and of another order
        return f'`"{value}"`'
    if isinstance(value, int) and value >= 1 << 30:
        return f'`"{value >> 30}G"`'
    return f"`{value}`" if isinstance(value, int) else f'`"{value}"`'
