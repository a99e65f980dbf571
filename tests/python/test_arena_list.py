# SPDX-License-Identifier: Apache-2.0
"""What `gpustasis arena list` says of checkpoints that are not needed, or not known, any more."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from click.testing import CliRunner

from gpustasis.cli import cli
from gpustasis.draining.drain import drain
from support.json_output import check_document
from support.local_checkpoints import make_local


def test_the_list_says_what_is_durable(tmp_path: Path, arena: Path) -> None:
    """What is drained and stays, because another is built on it, needs no drain; of what is not at
    its image directory any more nothing is known. The whole id is there, as `discard` wants it."""
    images, child = tmp_path / "one", tmp_path / "two"
    stored = make_local(images, arena)
    make_local(child, arena, ("A", "C"), parent=stored)

    def listed(*words: str) -> str:
        done = CliRunner().invoke(cli, ["arena", "list", "--arena", str(arena), *words])
        assert done.exit_code == 0, done.output
        return done.stdout

    def states() -> dict[str, str | None]:
        document = listed("--json")
        check_document(document, "arena list")
        return {entry["directory"]: entry["state"] for entry in json.loads(document)["entries"]}

    assert states() == {str(images): "local", str(child): "local"}
    drain(images)
    assert states() == {str(images): "durable", str(child): "local"}
    (line,) = (line for line in listed().splitlines() if str(images) in line)
    assert stored.name in line and " durable " in line
    shutil.rmtree(images)
    images.mkdir()
    assert states() == {str(images): None, str(child): "local"}
    (line,) = (line for line in listed().splitlines() if str(images) in line)
    assert " unknown " in line
    shutil.rmtree(images)
    assert states()[str(images)] is None
