# SPDX-License-Identifier: Apache-2.0
"""The program checkpointctl-gpustasis: a plugin of checkpointctl, which shows what `gpustasis
inspect` shows.

checkpointctl (cmd/plugin.go) takes executables checkpointctl-NAME in PATH for its subcommands. With
--plugin-description one prints a line and exits 42, within 500 ms: so nothing is imported before.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from gpustasis.errors import DESCRIBED

DESCRIPTION = "Show the GPU and CPU memory in a checkpoint (gpustasis)"


def main() -> NoReturn:
    """Exit as `gpustasis inspect` does, or with 42 if asked for a description."""
    if sys.argv[1:] == ["--plugin-description"]:
        print(DESCRIPTION)
        sys.exit(DESCRIBED)
    from gpustasis.cli.framework import run
    from gpustasis.cli.inspect import command

    run(command, "checkpointctl gpustasis")
