# SPDX-License-Identifier: Apache-2.0
"""What all commands have in common: exit statuses, errors, --json, text that is made harmless."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import gpustasis
from gpustasis import errors
from gpustasis.cli import COMMANDS, cli
from gpustasis.criu.find import Criu
from gpustasis.errors import CheckpointError
from support.image_samples import make_checkpoint, mixture
from support.job import Job

Gpustasis = Callable[..., subprocess.CompletedProcess[str]]

HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202e\ud800\rok "


def run(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "gpustasis", *map(os.fsencode, map(str, words))]
    return subprocess.run(
        argv, capture_output=True, text=True, check=False, errors="surrogateescape", **options
    )


def leaves(group: click.Group = cli, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command there is, by the words that call it."""
    context = click.Context(group)
    for word in group.list_commands(context):
        command = group.get_command(context, word)
        assert command is not None
        if isinstance(command, click.Group):
            yield from leaves(command, f"{name}{word} ")
        else:
            yield f"{name}{word}", command


def own_errors() -> list[type[CheckpointError]]:
    """The errors of the whole package, wherever they are defined."""
    for module in pkgutil.walk_packages(gpustasis.__path__, "gpustasis."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)

    def below(kind: type[CheckpointError]) -> Iterator[type[CheckpointError]]:
        yield kind
        for child in kind.__subclasses__():
            yield from below(child)

    return [kind for kind in below(CheckpointError) if kind.__module__.startswith("gpustasis.")]


def test_no_exit_status_stands_for_two_things() -> None:
    meanings: dict[int, list[str]] = {code: [what] for code, what in errors.OTHER_STATUSES.items()}
    for kind in own_errors():
        in_table = kind.__module__ == "gpustasis.errors"
        assert ("exit_code" in vars(kind)) == in_table, f"{kind}: statuses are given in errors.py"
        if in_table:
            meanings.setdefault(kind.exit_code, []).append(kind.__name__)
    assert {code: names for code, names in meanings.items() if len(names) > 1} == {}
    assert all(0 <= code < 256 for code in meanings)


def test_every_error_says_what_it_is() -> None:
    for kind in own_errors():
        assert (inspect.getdoc(kind) or "").strip()


def test_every_command_answers_in_json() -> None:
    names = {name for name, _ in leaves()}
    assert {"checkpoint", "containerd list", "emulator fault add", "kubelet list"} <= names
    assert {name.split()[0] for name in names} == set(COMMANDS)
    for name, command in leaves():
        options = {word for option in command.params for word in option.opts}
        assert "--json" in options, name


def test_every_option_says_what_it_is() -> None:
    """More than its default, and in which unit a number of seconds is."""
    for name, command in leaves():
        for option in command.params:
            if isinstance(option, click.Option):
                text = (option.help or "").split("[")[0]
                assert len(text.split()) > 2, (name, option.opts, option.help)
                assert option.metavar != "S" or "econds" in text, (name, option.opts, text)


def test_help_names_every_variable() -> None:
    for name, command in leaves():
        for option in command.params:
            if isinstance(option, click.Option) and option.envvar is not None:
                assert option.show_envvar, (name, option.opts)


def test_the_module_that_is_no_command() -> None:
    done = run("jit", "--store", "x", "train.py")
    assert done.returncode == 2
    assert "python -m gpustasis.jit" in done.stderr
    assert "python -m gpustasis.jit" in run("--help").stdout


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["verify"], "verify"),
        (["checkpoint", "zero", "-D", "x"], "checkpoint"),
        (["checkpoint", "--no-such-option"], "checkpoint"),
        (["containerd", "checkpoint"], "containerd checkpoint"),
        (["prune", "/tmp"], "prune"),
        (["no-such-command"], ""),
        (["--no-such-option"], ""),
    ],
)
def test_a_wrong_command_line(words: list[str], command: str) -> None:
    done = run(*words, "--json")
    assert done.returncode == 2
    found = json.loads(done.stdout)
    assert (found["version"], found["command"]) == (1, command)
    assert (found["error"]["code"], found["error"]["name"]) == (2, "UsageError")
    assert found["error"]["message"] in done.stderr
    plain = run(*words)
    assert (plain.returncode, plain.stdout, plain.stderr) == (2, "", done.stderr)
    assert plain.stderr.startswith("Usage: gpustasis")


def test_an_error_as_json(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"text")
    done = run("inspect", tmp_path / "a", "--json")
    assert done.returncode == 13
    assert json.loads(done.stdout) == {
        "version": 1,
        "command": "inspect",
        "error": {
            "code": 13,
            "name": "ArchiveError",
            "message": f"{tmp_path / 'a'}: is no checkpoint archive: neither tar nor gzip nor zstd",
        },
    }
    assert done.stderr == run("inspect", tmp_path / "a").stderr


def test_what_was_found_stands_beside_the_error(tmp_path: Path) -> None:
    done = run("verify", tmp_path, "--json")
    found = json.loads(done.stdout)
    assert len(found["problems"]) == 1
    assert found["error"]["name"] == "ImageError"


def test_a_bug_is_told_as_such(tmp_path: Path) -> None:
    script = (
        "import gpustasis.cli.install as module\n"
        "def broken(): raise ZeroDivisionError('\\x1b[2J')\n"
        "module.plugin_directory = broken\n"
        "from gpustasis.cli import main; main()"
    )
    argv = [sys.executable, "-c", script, "plugin-dir", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["name"] == "ZeroDivisionError"
    assert "Traceback (most recent call last)" in done.stderr
    assert "this is a bug in gpustasis: \\x1b[2J" in done.stderr
    assert "\x1b" not in done.stderr


def test_an_interrupt_ends_with_130(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token")  # waited for, since nobody writes to it
    argv = [sys.executable, "-c", INTERRUPTIBLE, str(tmp_path / "token"), "--json"]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "waiting\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        try:
            said, complaint = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert json.loads(said)["error"] == {
        "code": 130,
        "name": "Interrupted",
        "message": "interrupted",
    }
    assert complaint.strip() == "gpustasis: interrupted"


INTERRUPTIBLE = """
import signal, sys
from gpustasis.cli import install, main
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may ignore it
fifo = sys.argv.pop(1)
def wait():
    print("waiting", file=sys.stderr, flush=True)
    return open(fifo).read()
install.plugin_directory = wait
sys.argv.insert(1, "plugin-dir")
main()
"""


def test_a_reader_that_goes_away_is_no_bug(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, {7: mixture()})
    read, write = os.pipe()
    os.close(read)
    argv = [sys.executable, "-m", "gpustasis", "inspect", str(tmp_path)]
    try:
        done = subprocess.run(argv, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def escapes_of(text: str) -> list[str]:
    """What a terminal would obey, line ends aside."""
    return [char for char in text.replace("\n", "") if not char.isprintable()]


def test_hostile_paths_are_shown(tmp_path: Path) -> None:
    place = tmp_path / HOSTILE.replace("\ud800", "\udcff")
    place.mkdir()
    make_checkpoint(place, {7: mixture()})
    shown = "\\x1b[2J\\x1b]0;owned\\x07\\u202e\\xff\\rok "
    for words in (["inspect", place], ["verify", place], ["diff", place, place]):
        done = run(*words)
        assert done.returncode == 0, done.stderr
        assert shown in done.stdout.replace("\n", ""), words
        assert escapes_of(done.stdout + done.stderr) == []
        assert json.loads(run(*words, "--json").stdout)
    (place / "gpustasis-7.img").write_bytes(b"no image")
    for words in (["verify", place], ["inspect", place], ["flatten", place, "-o", place / "out"]):
        done = run(*words)
        assert done.returncode == 10, done.stderr
        assert shown in done.stderr
        assert escapes_of(done.stdout + done.stderr) == []
    usage = run(place)
    assert usage.returncode == 2
    assert escapes_of(usage.stderr) == []


def test_hostile_names_of_processes_are_shown(
    criu: Criu, gpustasis: Gpustasis, launch: Callable[..., Job], tmp_path: Path
) -> None:
    """comm is the beginning of the program's name, and is dumped as it is."""
    name = "\x1b[2Jow\rn\u202e"
    program = tmp_path / name
    shutil.copy(shutil.which("sleep") or "", program)
    job = launch([str(program), "1000"])
    images = tmp_path / "images"
    words = ("--leave-running", "--criu", str(criu.root or criu.program))
    done = gpustasis("checkpoint", str(job.pid), "-D", images, *words)
    assert done.returncode == 0, done.stderr
    done = gpustasis("inspect", images)
    assert "\\x1b[2Jow\\rn\\u202e" in done.stdout
    assert escapes_of(done.stdout) == []
    found = json.loads(gpustasis("inspect", images, "--json").stdout)
    assert [process["comm"] for process in found["processes"]] == [name]


def test_log_records_are_shown(tmp_path: Path) -> None:
    script = (
        "import logging, gpustasis.cli.install as module\n"
        "from pathlib import Path\n"
        "def told(): logging.getLogger('x').warning('%s\\nERROR y', '\\x1b[2J'); return "
        "Path('/p')\n"
        "module.plugin_directory = told\n"
        "from gpustasis.cli import main; main()"
    )
    argv = [sys.executable, "-c", script, "plugin-dir"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stderr == "WARNING x: \\x1b[2J\n  ERROR y\n"
