# SPDX-License-Identifier: Apache-2.0
"""checkpointctl-gpustasis keeps to what checkpointctl's cmd/plugin.go asks of a plugin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.archives import pack
from support.image_samples import make_checkpoint, mixture

PLUGIN = Path(sys.executable).with_name("checkpointctl-gpustasis")


def run(*words: object) -> subprocess.CompletedProcess[str]:
    argv = [str(PLUGIN), *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_it_describes_itself_in_a_line_and_ends_with_42() -> None:
    done = run("--plugin-description")
    assert done.returncode == 42
    assert done.stdout.count("\n") == 1
    assert "GPU" in done.stdout
    assert done.stderr == ""


def test_it_imports_nothing_large_before_it_has_described_itself() -> None:
    """checkpointctl waits 500 ms."""
    code = (
        "import sys, gpustasis.checkpointctl as plugin\n"
        "sys.argv = ['checkpointctl-gpustasis', '--plugin-description']\n"
        "try: plugin.main()\n"
        "except SystemExit as exc: assert exc.code == 42\n"
        "print(sorted({'click', 'rich', 'gpustasis._core', 'zstandard'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_its_view_is_that_of_inspect(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "images").mkdir()
    make_checkpoint(tmp_path / "images", {7: mixture()})
    archive = pack(tmp_path / "images", tmp_path / "a.tar.zst", compression="zstd")
    inspect = [sys.executable, "-m", "gpustasis", "inspect", str(archive), *words]
    expected = subprocess.run(inspect, capture_output=True, text=True, check=True).stdout
    done = run(archive, *words)
    assert (done.returncode, done.stdout) == (0, expected)
    assert "trainer" in expected


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"text", "is no checkpoint archive: neither tar nor gzip nor zstd"),
        (b"", "is cut short: it is empty"),
    ],
)
def test_its_errors_are_a_line(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "a").write_bytes(content)
    done = run(tmp_path / "a")
    assert done.returncode == 13
    assert done.stderr == f"checkpointctl gpustasis: {tmp_path / 'a'}: {said}\n"
