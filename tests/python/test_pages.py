# SPDX-License-Identifier: Apache-2.0
"""Man pages and completion scripts, as the wheel installs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from gpustasis.cli import cli

SHARE = Path(sys.prefix) / "share"
COMPLETION = {
    "bash": SHARE / "bash-completion/completions/gpustasis",
    "zsh": SHARE / "zsh/site-functions/_gpustasis",
    "fish": SHARE / "fish/vendor_completions.d/gpustasis.fish",
}


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for word in command.list_commands(context):
            found = command.get_command(context, word)
            assert found is not None
            yield from commands(found, f"{name}-{word}")


ALL = dict(commands(cli, "gpustasis"))


def test_there_is_a_page_for_each_command_and_no_other() -> None:
    found = {path.name for path in (SHARE / "man/man1").glob("gpustasis*")}
    assert found == {f"{name}.1" for name in ALL}


@pytest.mark.parametrize("name", ALL)
def test_a_page_is_rendered(name: str) -> None:
    argv = ["man", "--warnings", "-E", "ascii", "-l", str(SHARE / f"man/man1/{name}.1")]
    environ = {"MANWIDTH": "200", "PATH": os.environ["PATH"]}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    text = re.sub(r".\x08|\x1b\[[0-9;]*m", "", done.stdout)
    for part in ("NAME", "SYNOPSIS", "DESCRIPTION"):
        assert re.search(rf"^{part}$", text, re.MULTILINE)
    for option in ALL[name].params:
        if isinstance(option, click.Option):
            assert all(word in text for word in option.opts), option.opts


def completed(shell: str, *words: str) -> list[str]:
    """What the program offers for the last of these words."""
    given = words if shell == "bash" else words[:-1]
    environ = os.environ | {
        "_GPUSTASIS_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": " ".join(("gpustasis", *words)),
        "COMP_CWORD": words[-1] if shell == "fish" else str(len(given) + (shell != "bash")),
    }
    argv = [str(Path(sys.executable).with_name("gpustasis"))]
    said = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True).stdout
    return said.split()


@pytest.mark.parametrize("shell", COMPLETION)
def test_words_are_completed(shell: str) -> None:
    assert any("checkpoint" in word for word in completed(shell, "chec"))
    assert any("--leave-running" in word for word in completed(shell, "checkpoint", "--leave"))
    script = COMPLETION[shell].read_text()
    assert f"_GPUSTASIS_COMPLETE={shell}_complete" in script


def test_bash_completes() -> None:
    script = (
        f"source {COMPLETION['bash']}; complete -p gpustasis; "
        "COMP_WORDS=(gpustasis ver); COMP_CWORD=1; _gpustasis_completion gpustasis ver gpustasis; "
        "printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", script], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "verify"
