# SPDX-License-Identifier: Apache-2.0
"""A command of the program, run in this process, with the status that it would end with."""

from __future__ import annotations

from dataclasses import dataclass

from click.testing import CliRunner

from gpustasis.cli import cli
from gpustasis.errors import CheckpointError


@dataclass(frozen=True)
class Outcome:
    """stdout, and all that was said: stderr too, and the message of the error that ended it."""

    exit_code: int
    stdout: str
    output: str


def call(*words: object) -> Outcome:
    """Raises what is no error of ours."""
    done = CliRunner().invoke(cli, [str(word) for word in words])
    if isinstance(done.exception, CheckpointError):
        said = f"{done.output}{done.exception}"
        return Outcome(done.exception.exit_code, done.stdout, said)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Outcome(done.exit_code, done.stdout, done.output)
