# SPDX-License-Identifier: Apache-2.0
"""`python -m gpustasis.jit` and `gpustasis preempt`: checkpoints just in time."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import click

from gpustasis.cli import output
from gpustasis.cli.framework import Command
from gpustasis.cli.options import (
    Size,
    chain_option,
    check_of,
    interval_options,
    periodic_of,
    verify_options,
)
from gpustasis.criu.find import find
from gpustasis.errors import CheckpointError
from gpustasis.image.directory import allow_many_files
from gpustasis.preemption import asking, start, supervisor
from gpustasis.preemption.making import Settings
from gpustasis.preemption.privileges import own_privileges, require_privileges
from gpustasis.preemption.records import identify
from gpustasis.preemption.signals import Signals
from gpustasis.preemption.store import JobStore
from gpustasis.preemption.streams import Outlet

CHECKPOINTED = 75  # EX_TEMPFAIL of sysexits.h: to be tried again


@click.command(
    "jit",
    context_settings={
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
    },
)
@click.option(
    "--store",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="A directory for the checkpoints of this job alone; made if it is not there.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0.0),
    default=30.0,
    show_default=True,
    help="Seconds from SIGTERM to SIGKILL.",
)
@click.option(
    "--reserve",
    type=click.FloatRange(0.1),
    default=5.0,
    show_default=True,
    help="Seconds of --grace that the job gets to end by itself when there is no checkpoint.",
)
@click.option(
    "--keep-last",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    metavar="N",
    help="Keep the newest N checkpoints.",
)
@interval_options
@chain_option("With --interval: how many checkpoints are built on a full one")
@click.option(
    "--speed",
    type=Size(),
    metavar="SIZE",
    help="Memory that a checkpoint stores in a second, such as 1GiB: tells whether one can be made "
    "within --grace.  [default: as the last one did; 200MiB for the first]",
)
@click.option(
    "--checkpointed-status",
    type=click.IntRange(0, 255),
    default=CHECKPOINTED,
    show_default=True,
    help="Exit status once the job is in a checkpoint.",
)
@click.option(
    "--never-afresh",
    is_flag=True,
    help="If none of the job's checkpoints can be restored, end with an error; do not start it.",
)
@verify_options
@click.option(
    "--network-lock",
    type=click.Choice(["nftables", "iptables", "skip"]),
    default="nftables",
    show_default=True,
    help="How criu holds back the packets of open connections.",
)
@click.option(
    "--criu",
    "criu_program",
    metavar="PATH",
    help="The criu program, or a root directory that holds one.",
)
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as for python -m.")
@click.argument(
    "words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT [ARGS...]"
)
def command(
    store: Path,
    grace: float,
    reserve: float,
    keep_last: int,
    interval: timedelta | str | None,
    mtbf: timedelta,
    max_chain: int,
    speed: int | None,
    checkpointed_status: int,
    never_afresh: bool,
    verify_after: tuple[str, ...] | None,
    verify_timeout: float,
    older_if_unverified: bool,
    network_lock: str,
    criu_program: str | None,
    module: bool,
    words: tuple[str, ...],
) -> int:
    """Run a job: SCRIPT.py or -m MODULE with this Python, anything else as a program.

    Upon SIGTERM it is checkpointed as it is, with all processes below it, within the grace period;
    where that cannot be done it gets the SIGTERM. Started again with the same words in the same
    directory, it goes on from its newest checkpoint.
    """
    if reserve >= grace:
        raise click.UsageError(f"--reserve {reserve:g} leaves nothing of --grace {grace:g}")
    check = check_of(verify_after, verify_timeout, older=older_if_unverified)
    if speed == 0:
        raise click.UsageError("--speed 0: no checkpoint would ever be ready")
    output.start_log(30)
    allow_many_files()
    require_privileges(*own_privileges())
    argv, script = _command(words, module)
    try:
        identity = identify(argv, script)
    except OSError as exc:
        raise click.UsageError(f"cannot read {words[0]}: {exc.strerror}") from exc
    settings = Settings(
        command=argv,
        identity=identity,
        criu=find(criu_program),
        grace_s=grace,
        reserve_s=reserve,
        keep_last=keep_last,
        rate=speed,
        checkpointed_status=checkpointed_status,
        afresh=not never_afresh,
        network_lock=network_lock,
        check=check,
        older=older_if_unverified,
        periodic=periodic_of(interval, mtbf),
        max_chain=max_chain,
    )
    start.keep_descriptors()
    supervisor.become_subreaper()
    with Signals() as signals, JobStore(store) as held:
        outlets = (Outlet(1), Outlet(2))
        return supervisor.Supervisor(settings, held, signals, outlets, _say).run()


def _say(text: str) -> None:
    """Whoever reads it may be gone: that is nothing to the job."""
    with suppress(OSError, ValueError):
        output.warn(f"gpustasis.jit: {text}")


def _command(words: tuple[str, ...], module: bool) -> tuple[tuple[str, ...], Path | None]:
    """What is run, and the script in it."""
    if module:
        return (sys.executable, "-m", *words), None
    if words[0].endswith(".py"):
        return (sys.executable, *words), Path(words[0])
    program = shutil.which(words[0])
    if program is None:
        raise click.UsageError(f"there is no program {words[0]}")
    script = next((Path(word) for word in words[1:] if word.endswith(".py")), None)
    return (os.path.abspath(program), *words[1:]), script if script and script.is_file() else None


@click.command("preempt", cls=Command)
@click.argument("pid", type=click.IntRange(1))
@click.option(
    "--timeout",
    type=click.FloatRange(0.0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds to wait for the job's supervisor, or the rank's keeper, to end.",
)
def preempt(pid: int, timeout: float) -> None:
    """Have the job of PID checkpointed just in time, and wait until that is done.

    PID is a `python -m gpustasis.jit` or a `gpustasis job run --checkpoint-on-sigterm`, or any
    process below one. It is sent SIGTERM, and does what it does then: the job is in a checkpoint,
    all ranks of it, or there is none, which is an error here.
    """
    done = asking.preempt(pid, timeout)
    if not done.checkpoint and done.keeper:
        raise CheckpointError(f"keeper {done.supervisor}: no checkpoint: {done.because}")
    if not done.checkpoint:
        raise CheckpointError(
            f"supervisor {done.supervisor} has ended without a checkpoint: {done.because}"
        )
    fields = {name: value for name, value in asdict(done).items() if name != "keeper"}
    output.answer(fields, lambda: output.say(f"the job is in {done.checkpoint} ({done.because})"))
