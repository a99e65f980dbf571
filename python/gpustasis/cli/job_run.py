# SPDX-License-Identifier: Apache-2.0
"""`gpustasis job run`: one rank of a job, under a keeper."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpustasis import nccl
from gpustasis.cli import output
from gpustasis.cli.framework import Command
from gpustasis.cli.job_options import (
    commit_option,
    limit_options,
    open_store,
    preempting_options,
    store_options,
)
from gpustasis.cli.job_recovery import (
    Choice,
    choice_of,
    keep_recovered,
    recovery_options,
    wait_a_moment,
)
from gpustasis.cli.options import (
    chain_option,
    check_of,
    interval_options,
    periodic_of,
    verify_options,
)
from gpustasis.errors import JobError, StoreError
from gpustasis.jobs.messages import Limits

if TYPE_CHECKING:
    from gpustasis.intervals import Periodic
    from gpustasis.jobs.ending import Early, Ended
    from gpustasis.jobs.member import Settings
    from gpustasis.jobs.preempting import Grace, Preempting
    from gpustasis.jobs.rank import Context
    from gpustasis.jobs.supervise import Supervisor

Decorated = TypeVar("Decorated", bound=Callable[..., object])
_RUN = "/run/gpustasis/jobs"


@click.command("run", cls=Command)
@click.option(
    "--job", required=True, metavar="NAME", help="The job's name, the same for all its ranks."
)
@click.option(
    "--rank",
    required=True,
    type=click.IntRange(0),
    metavar="R",
    help="Number of this rank, from 0.",
)
@click.option(
    "--world",
    required=True,
    type=click.IntRange(1),
    metavar="N",
    help="How many ranks the job has.",
)
@click.option(
    *("-D", "--directory"),
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for checkpoints and COMMAND's output, in a subdirectory rank-R; made if it is "
    "not there. Name the same one at a restore.",
)
@click.option(
    "--restore",
    is_flag=True,
    help="Start nothing, and wait for `gpustasis job restore`; without COMMAND.",
)
@click.option(
    "--restore-newest",
    is_flag=True,
    help="Restore the job's newest whole checkpoint, once all ranks are there, instead of starting "
    "COMMAND; where there is none, or the job has ended well after it, start COMMAND.",
)
@interval_options
@click.option(
    "--keep-last",
    type=click.IntRange(1),
    metavar="N",
    help="After each checkpoint that leaves the job running, made or aborted, remove all but the "
    "newest N whole ones, those on this host.  [default: all stay]",
)
@chain_option("How many of the rank's dumps by --interval are built on a full one")
@commit_option
@preempting_options
@click.option("--tcp-close", is_flag=True, help="TCP connections come back closed at a restore.")
@click.option(
    "--outside", is_flag=True, help="Checkpoint although connections lead to no rank of the job."
)
@verify_options
@click.option(
    "--safe-points",
    is_flag=True,
    help="Make checkpoints only where COMMAND calls gpustasis.job.safe_point().",
)
@click.option(
    "--risk",
    "risks",
    multiple=True,
    type=click.Choice(nccl.RISKS),
    help="Checkpoint although the rank's processes have this of NCCL (docs/operating.md, `What "
    "NCCL needs`). Several times for several.",
)
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
    help="Directory for locks and scripts, which are of use until the next boot only.",
)
@limit_options
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
    restore_newest: bool,
    interval: timedelta | str | None,
    mtbf: timedelta,
    keep_last: int | None,
    max_chain: int,
    commit_at: str,
    checkpoint_on_sigterm: bool,
    grace: float,
    reserve: float,
    speed: int | None,
    checkpointed_status: int,
    tcp_close: bool,
    outside: bool,
    safe_points: bool,
    risks: tuple[str, ...],
    verify_after: tuple[str, ...] | None,
    verify_timeout: float,
    older_if_unverified: bool,
    criu_program: str | None,
    run_directory: Path,
    ttl: int,
    away: float,
    look_limit: float,
    safe_point_limit: float,
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

    Ends as COMMAND does, with its status; with that of --checkpointed-status when a checkpoint has
    ended it. Has to run in the network namespace of the rank, as root. With --restarts it ends when
    the whole job does.
    """
    from gpustasis.criu.find import find
    from gpustasis.jobs.aftercare import tended
    from gpustasis.jobs.member import Settings
    from gpustasis.jobs.neighbour import CommitAt
    from gpustasis.jobs.place import place_of
    from gpustasis.jobs.preempting import Preempting
    from gpustasis.jobs.rank import Context, Options
    from gpustasis.jobs.records import Keys

    choice, tell = choice_of(options), output.teller()
    if restore and words:
        raise click.UsageError("--restore takes no COMMAND: what was checkpointed runs again")
    if restore_newest and (restore or not words):
        raise click.UsageError("--restore-newest needs COMMAND, and excludes --restore")
    if rank >= world:
        raise click.UsageError(f"--rank {rank}: must be 0 to {world - 1}")
    # Before there is a directory of that name.
    keys, safe_point_s = Keys(job), safe_point_limit if safe_points else 0.0
    terms, periodic = _grace(grace, reserve, speed), periodic_of(interval, mtbf)
    limits = Limits(
        look_s=look_limit + safe_point_s,
        lock_cuda_s=cuda_limit,
        lock_network_s=network_limit,
        dump_s=dump_limit,
    )
    settings = Settings(limits=limits, ttl_s=ttl, store_s=away, writes_per_s=writes)
    use = Options(
        criu=find(criu_program),
        tcp_close=tcp_close,
        outside=outside,
        safe_point_s=safe_point_s,
        risks=frozenset(risks),
        cuda_timeout_ms=max(1, int(cuda_limit * 500)),
        check=check_of(verify_after, verify_timeout, older=older_if_unverified),
        older=older_if_unverified,
        keep_last=keep_last or 0,
        max_chain=max_chain,
        commit_at=CommitAt(commit_at),
    )
    with open_store(options) as store:
        place = place_of(job, rank, directory, run_directory)
        place.make()
        waits = wait_a_moment if choice.standby else None
        if choice.standby:
            tell(f"job {job}, rank {rank}: stands by until the rank has no keeper")
        with place.kept(waits, preemptible=checkpoint_on_sigterm) as says:
            context = Context(place, world, store, keys, use)
            if safe_points:
                context.seat.make(anew=False)
            preempts = Preempting(context, terms, tell, says) if checkpoint_on_sigterm else None
            with tended(context.aftercare, output.warn):
                ended = _keep_rank(
                    *(context, settings, choice, words),
                    restore=restore,
                    newest=restore_newest,
                    periodic=periodic,
                    preempting=preempts,
                )
                says(**_end_of(context, ended, preempts.because if preempts else ""))
    fields = {"job": job, "rank": rank, "epoch": ended.epoch or None, "status": ended.status}

    def show() -> None:
        if ended.epoch:
            tell(f"job {job}, rank {rank}: ended by the checkpoint of epoch {ended.epoch}")

    output.answer(fields, show)
    if ended.status is None and not ended.epoch:  # which may have been any
        raise JobError(
            f"job {job}, rank {rank}: its tasks have ended, and their status is not known, for "
            "another keeper had started them"
        )
    status = checkpointed_status if ended.epoch else ended.status
    if status:
        output.finish()
        raise click.exceptions.Exit(status)


def _end_of(context: Context, ended: Ended, because: str) -> dict[str, str]:
    """What whoever has asked this keeper for a checkpoint is told."""
    place = context.place
    if not ended.epoch:
        status = "not known" if ended.status is None else ended.status
        return {"because": because or f"{context.name} has ended, status {status}"}
    made = f"epoch {ended.epoch} of job {place.job}"
    return {"checkpoint": str(place.images(ended.epoch)), "because": made}


def _grace(grace: float, reserve: float, speed: int | None) -> Grace:
    from gpustasis.jobs.preempting import Grace

    if reserve >= grace:
        raise click.UsageError(f"--reserve {reserve:g} leaves nothing of --grace {grace:g}")
    if speed == 0:
        raise click.UsageError("--speed 0: no checkpoint would ever be ready")
    return Grace(grace_s=grace, reserve_s=reserve, rate=speed)


def _begin(
    supervisor: Supervisor,
    context: Context,
    words: tuple[str, ...],
    restore: bool,
    newest: bool,
    early: Early,
) -> int:
    """Start the command, if it is to be started. The checkpoint that is restored in place of it;
    0: none, or somebody else asks for it."""
    from gpustasis.jobs.lead import LEAD
    from gpustasis.jobs.preempting import to_restore

    name, tell = f"job {context.place.job}, rank {context.place.rank}", output.teller()
    is_taken_over = newest and supervisor.settle()
    if is_taken_over:
        early.hold()  # there are tasks: what follows asks the store, which may be away
    found = to_restore(context, told=tell) if newest and not is_taken_over else 0
    if words or restore:
        try:
            context.say_where()
        except StoreError as exc:
            if not is_taken_over:
                raise
            # The tasks must not lose their keeper. Whoever was that here before has said the same.
            tell(f"{name}: its addresses are not told anew: {exc}")
    if found:
        is_sure = context.place.rank == LEAD or not context.options.older
        tell(f"{name}: goes on from epoch {found}{'' if is_sure else ', or an older one'}")
    elif restore:
        tell(f"{name}: waits to be restored")
    elif words and not is_taken_over:
        pid = supervisor.start(words, os.environ, early)
        tell(f"{name}: process {pid}, output in {context.place.log}")
    return found


def _keep_rank(
    context: Context,
    settings: Settings,
    choice: Choice,
    words: tuple[str, ...],
    *,
    restore: bool,
    newest: bool,
    periodic: Periodic | None,
    preempting: Preempting | None,
) -> Ended:
    """Until the rank has ended."""
    from gpustasis.jobs.supervise import Supervisor

    if choice.restarts is not None:
        return keep_recovered(
            *(context, settings, choice, words),
            restore=restore,
            newest=newest,
            periodic=periodic,
            preempting=preempting,
        )
    supervisor = Supervisor(context, settings, output.teller(), preempting)
    return _keep(supervisor, context, words, restore, newest, periodic)


def _keep(
    supervisor: Supervisor,
    context: Context,
    words: tuple[str, ...],
    restore: bool,
    newest: bool,
    periodic: Periodic | None,
) -> Ended:
    """The same of a job that is not recovered."""
    from gpustasis.jobs.clock import by_the_clock
    from gpustasis.jobs.ending import Early
    from gpustasis.jobs.preempting import note_ended

    if context.state.lives and context.state.life:
        raise JobError(f"{context.name} was started with --restarts: its keeper must be, too")
    if not (words or restore):
        context.require_left()
    with by_the_clock(context, periodic, output.teller()), Early() as early:
        begun = _begin(supervisor, context, words, restore, newest, early)
        waits = restore or bool(begun)
        ended = supervisor.run(restoring=waits, restart=begun, early=early)
    if newest and not ended.epoch and ended.status == 0 and not ended.told:
        note_ended(context, output.warn)
    return ended
