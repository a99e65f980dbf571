# SPDX-License-Identifier: Apache-2.0
"""`gpustasis job run`: one rank of a job, under a keeper."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpustasis.cli import output
from gpustasis.cli.framework import Command
from gpustasis.cli.job_options import open_store, store_options
from gpustasis.cli.job_recovery import Choice, choice_of, recovery_options
from gpustasis.errors import JobError
from gpustasis.jobs.messages import Limits

if TYPE_CHECKING:
    from gpustasis.jobs.member import Settings
    from gpustasis.jobs.rank import Context
    from gpustasis.jobs.recovering import Recovering
    from gpustasis.jobs.supervise import Ended

_LIMITS = Limits()
_RUN = "/run/gpustasis/jobs"
_POLL_S = 0.2


def _seconds(
    name: str, default: float, text: str
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    return click.option(
        name,
        type=click.FloatRange(min=0.1),
        default=default,
        show_default=True,
        metavar="S",
        help=text,
    )


@click.command("run", cls=Command)
@click.option("--job", required=True, metavar="NAME", help="The job's name, the same for all.")
@click.option("--rank", required=True, type=click.IntRange(0), metavar="R", help="From 0.")
@click.option("--world", required=True, type=click.IntRange(1), metavar="N", help="How many.")
@click.option(
    *("-D", "--directory"),
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="For checkpoints and the command's output, in a subdirectory of the rank; the same at a "
    "restore.",
)
@click.option("--restore", is_flag=True, help="Wait for `gpustasis job restore`; no COMMAND.")
@click.option("--tcp-close", is_flag=True, help="Connections come back closed.")
@click.option("--outside", is_flag=True, help="Allow connections that lead to no rank of the job.")
@click.option(
    "--criu",
    "criu_program",
    metavar="PATH",
    help="The criu program, or a root directory that holds one.",
)
@click.option(
    "--run-directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(_RUN),
    show_default=True,
    help="For what is of this boot only.",
)
@click.option(
    "--ttl",
    type=click.IntRange(2),
    default=10,
    show_default=True,
    metavar="S",
    help="How long the others wait for a rank that says nothing.",
)
@_seconds("--away", 8.0, "How long the store may be away before a rank acts, if it may.")
@_seconds("--look-limit", _LIMITS.look_s, "For all ranks to be there, and to look.")
@_seconds("--cuda-limit", _LIMITS.lock_cuda_s, "To lock CUDA.")
@_seconds("--network-limit", _LIMITS.lock_network_s, "To lock the network.")
@_seconds("--dump-limit", _LIMITS.dump_s, "For all dumps, or restores, and their decision.")
@click.option(
    "--writes",
    type=click.FloatRange(min=1),
    default=1000.0,
    show_default=True,
    metavar="N",
    help="Writes a second that the whole job may ask of the store; the same for all ranks.",
)
@recovery_options
@store_options
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def run(
    job: str,
    rank: int,
    world: int,
    directory: Path,
    restore: bool,
    tcp_close: bool,
    outside: bool,
    criu_program: str | None,
    run_directory: Path,
    ttl: int,
    away: float,
    look_limit: float,
    cuda_limit: float,
    network_limit: float,
    dump_limit: float,
    writes: float,
    words: tuple[str, ...],
    **options: Any,
) -> None:
    """Run COMMAND as one rank of a job, and checkpoint it when `gpustasis job checkpoint` asks.

    What COMMAND prints goes to DIRECTORY/rank-R/output.log. Without COMMAND and --restore, be the
    keeper of a rank whose keeper has died: its tasks were left as they were.

    Ends as COMMAND does, with its status; with 0 when a checkpoint has ended it. Has to run in the
    network namespace of the rank, as root. With --restarts it ends when the whole job does.
    """
    from gpustasis.criu.find import find
    from gpustasis.jobs.member import Settings
    from gpustasis.jobs.place import place_of
    from gpustasis.jobs.rank import Context, Options
    from gpustasis.jobs.records import Keys

    choice = choice_of(options)
    if restore and words:
        raise click.UsageError("--restore and COMMAND exclude each other: it is restored")
    if rank >= world:
        raise click.UsageError(f"--rank {rank}: must be 0 to {world - 1}")
    limits = Limits(
        look_s=look_limit, lock_cuda_s=cuda_limit, lock_network_s=network_limit, dump_s=dump_limit
    )
    settings = Settings(limits=limits, ttl_s=ttl, store_s=away, writes_per_s=writes)
    use = Options(
        criu=find(criu_program),
        tcp_close=tcp_close,
        outside=outside,
        cuda_timeout_ms=max(1, int(cuda_limit * 500)),
    )
    with open_store(options) as store:
        place = place_of(job, rank, directory, run_directory)
        place.make()
        held = place.only_keeper(_wait if choice.standby else None)
        try:
            context = Context(place, world, store, Keys(job), use)
            ended = _keep(context, settings, choice, words, restore=restore)
        finally:
            os.close(held)
    fields = {"job": job, "rank": rank, "epoch": ended.epoch or None, "status": ended.status}

    def show() -> None:
        if ended.epoch:
            output.say(f"job {job}, rank {rank}: ended by the checkpoint of epoch {ended.epoch}")
        elif ended.status is None:
            output.say(f"job {job}, rank {rank}: ended, its status is not known")

    output.answer(fields, show)
    if ended.status:
        output.finish()
        raise click.exceptions.Exit(ended.status)


def _keep(
    context: Context,
    settings: Settings,
    choice: Choice,
    words: tuple[str, ...],
    *,
    restore: bool,
) -> Ended:
    """Until the rank has ended."""
    from gpustasis.jobs.supervise import Supervisor

    what = f"job {context.place.job}, rank {context.place.rank}"
    recovering = None
    try:
        starts = bool(words)
        if choice.restarts is not None:
            recovering = _recovering(context, settings.ttl_s, choice)
        elif context.state.lives and context.state.life:
            raise JobError(f"{what} was started with --restarts: its keeper must be, too")
        supervisor = Supervisor(context, settings, output.say, recovering)
        if words or restore or choice.standby:
            context.say_where()
        if recovering is not None:
            is_new = bool(words or restore) and not choice.standby
            starts = recovering.begin(new=is_new, can_start=bool(words))
        if starts:
            pid = supervisor.start(words, os.environ)
            output.say(f"{what}: process {pid}, output in {context.place.log}")
        elif restore:
            output.say(f"{what}: waits to be restored")
        return supervisor.run(restoring=restore, command=(words, os.environ) if words else None)
    finally:
        if recovering is not None:
            recovering.close()


def _wait() -> bool:
    time.sleep(_POLL_S)
    return True


def _recovering(context: Context, ttl: int, choice: Choice) -> Recovering:
    """As the options say; once the rank has no keeper, if that is waited for."""
    from gpustasis.jobs.guard import Guard, where
    from gpustasis.jobs.hanging import Watcher
    from gpustasis.jobs.lives import Terms
    from gpustasis.jobs.recovering import Recovering

    assert choice.restarts is not None
    place = context.place
    terms = Terms(
        restarts=choice.restarts,
        afresh=choice.afresh,
        evidence=choice.evidence,
        back_off_s=choice.back_off,
    )
    guard = Guard(
        context.store,
        context.keys,
        place.rank,
        context.world,
        terms,
        where(place.run),
        ttl_s=ttl,
        told=output.say,
    )
    while choice.standby and not guard.has_seat():
        _wait()
    watcher = None
    if choice.hang_after is not None:
        watcher = Watcher(choice.hang_after, place.log, choice.progress)
    return Recovering(context, guard, watcher, output.say)
