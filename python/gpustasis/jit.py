# SPDX-License-Identifier: Apache-2.0
"""`python -m gpustasis.jit`: run a job that is checkpointed just in time. docs/just-in-time.md."""

from gpustasis.cli.framework import run
from gpustasis.cli.jit import command

if __name__ == "__main__":
    run(command, "gpustasis.jit", "python -m gpustasis.jit")
