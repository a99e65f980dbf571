# SPDX-License-Identifier: Apache-2.0
"""Recovery of jobs: options of `gpustasis job run`, and the commands that show and steer it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpustasis.cli import output
from gpustasis.cli.framework import Command
from gpustasis.cli.job_options import open_store, store_options
from gpustasis.errors import StoreError

if TYPE_CHECKING:
    from gpustasis.intervals import Periodic
    from gpustasis.jobs.ending import Ended
    from gpustasis.jobs.guard import Guard
    from gpustasis.jobs.member import Settings
    from gpustasis.jobs.preempting import Preempting
    from gpustasis.jobs.rank import Context
    from gpustasis.jobs.recovering import Recovering

_POLL_S = 0.2
Decorated = TypeVar("Decorated", bound=Callable[..., object])


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """As the options were given. restarts: None: the job is not recovered."""

    restarts: int | None
    afresh: bool
    back_off: float
    hang_after: float | None
    progress: Path | None
    evidence: bool
    standby: bool


def recovery_options(function: Decorated) -> Decorated:
    """--restarts and what belongs to it; choice_of takes them."""
    for option in reversed(
        (
            click.option(
                "--restarts",
                type=click.IntRange(0),
                metavar="N",
                help="When a rank fails, stop all of them and restore the newest whole checkpoint, "
                "at most N times.  [default: the other ranks are left alone]",
            ),
            click.option(
                "--afresh",
                is_flag=True,
                help="With --restarts: start COMMAND again where there is no whole checkpoint yet, "
                "or none that may bring the job back.",
            ),
            click.option(
                "--back-off",
                type=click.FloatRange(0, 86_400),
                default=1.0,
                show_default=True,
                metavar="S",
                help="Seconds to wait before the same checkpoint is restored once more; doubles "
                "each time, up to 300.",
            ),
            click.option(
                "--hang-after",
                type=click.FloatRange(min=1),
                metavar="S",
                help="With --restarts: a rank whose log has not grown, and that has used neither "
                "CPU nor GPU, for S seconds has failed, too.",
            ),
            click.option(
                "--progress",
                type=click.Path(dir_okay=False, path_type=Path),
                help="With --hang-after: this file changes when the rank makes progress, and "
                "nothing else counts.",
            ),
            click.option(
                "--evidence",
                is_flag=True,
                help="With --restarts: before ranks are stopped, store the stacks of all their "
                "processes below DIRECTORY, and make a checkpoint of a job that hangs.",
            ),
            click.option(
                "--standby",
                is_flag=True,
                help="With --restarts: wait until the rank has no keeper, and be its next keeper.",
            ),
        )
    ):
        function = option(function)
    return function


def choice_of(options: dict[str, Any]) -> Choice:
    """What recovery_options has named; it is taken out of `options`. Raises UsageError."""
    choice = Choice(**{name: options.pop(name) for name in Choice.__dataclass_fields__})
    if choice.restarts is None:
        asked = {
            "--afresh": choice.afresh,
            "--hang-after": choice.hang_after is not None,
            "--evidence": choice.evidence,
            "--standby": choice.standby,
        }
        if wrong := [name for name, is_given in asked.items() if is_given]:
            raise click.UsageError(f"{wrong[0]}: needs --restarts")
    if choice.progress is not None and choice.hang_after is None:
        raise click.UsageError("--progress: needs --hang-after")
    return choice


@click.command("recoveries", cls=Command)
@click.argument("name")
@store_options
def recoveries(name: str, **options: Any) -> None:
    """Say how job NAME is, and how often it was restored after a failure: why, and in what time.

    SECONDS go from when the failure was noticed until all ranks ran again; UNNOTICED is how long,
    at most, it had been there before.
    """
    from gpustasis.jobs.leading import read_ranks
    from gpustasis.jobs.records import Keys
    from gpustasis.jobs.steering import all_recoveries, find_life

    with open_store(options) as store:
        keys = Keys(name)
        life = find_life(store, keys)
        ranks = read_ranks(store, keys, life)
        found = all_recoveries(store, keys)
    titles = ("LIFE", "RANK", "SECONDS", "UNNOTICED", "RESTORED", "REASON")
    rows = [
        (
            *(one.life, one.rank, f"{one.seconds:.2f}", f"{one.unnoticed_s:.2f}"),
            *(one.restored or "-", one.reason),
        )
        for one in found
    ]
    fields = {
        "job": name,
        "life": life.number,
        "state": str(life.stage),
        "reason": life.why(),
        "restarts": life.begun,
        "most_restarts": life.terms.restarts,
        "ranks": [
            {
                "rank": rank,
                "state": str(ranks.standings[rank].way) if rank in ranks.standings else None,
                "keeper": ranks.keepers[rank].host if rank in ranks.keepers else None,
            }
            for rank in range(life.world)
        ],
        "recoveries": [asdict(one) for one in found],
    }

    def tell() -> None:
        why = f": {life.why()}" if life.why() else ""
        output.say(
            f"job {name}, life {life.number}: {life.stage}{why}; "
            f"{life.begun} of {life.terms.restarts} restarts"
        )
        output.table(titles, rows)

    output.answer(fields, tell)


@click.command("fence", cls=Command)
@click.argument("name")
@click.option(
    "--rank",
    required=True,
    type=click.IntRange(0),
    metavar="R",
    help="The rank that has no task left.",
)
@store_options
def fence(name: str, rank: int, **options: Any) -> None:
    """Say of job NAME that rank R has no task left, and that none can run on.

    For a rank whose host is gone for good, or was switched off: its keeper cannot say so, and job
    NAME waits. If it is not true, the rank runs twice.
    """
    from gpustasis.jobs.records import Keys
    from gpustasis.jobs.steering import fence as say_so

    with open_store(options) as store:
        life = say_so(store, Keys(name), rank)
    output.answer(
        {"job": name, "rank": rank, "life": life.number},
        lambda: output.say(f"job {name}: rank {rank} counts as stopped in life {life.number}"),
    )


@click.command("give-up", cls=Command)
@click.argument("name")
@store_options
def give_up(name: str, **options: Any) -> None:
    """End job NAME, which is recovered: its keepers stop all ranks and end.

    The next start of it begins anew. Checkpoints are left as they are.
    """
    from gpustasis.jobs.records import Keys
    from gpustasis.jobs.steering import give_up as end

    with open_store(options) as store:
        life = end(store, Keys(name))
    output.answer(
        {"job": name, "life": life.number, "state": str(life.stage)},
        lambda: output.say(f"job {name}: given up"),
    )


@click.command("replay", cls=Command)
@click.argument("name")
@click.argument("epoch", type=click.IntRange(1))
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(0),
    multiple=True,
    metavar="R",
    help="This one only; several times for several.  [default: all whose dumps are here]",
)
@click.option("--run", "runs", is_flag=True, help="They run; else they stand, to be looked at.")
@click.option(
    "--criu",
    "criu_program",
    metavar="PATH",
    help="The criu program, or a root directory that holds one.",
)
@store_options
def replay(
    name: str,
    epoch: int,
    ranks: tuple[int, ...],
    runs: bool,
    criu_program: str | None,
    **options: Any,
) -> None:
    """Restore ranks of job NAME from checkpoint EPOCH, cut off from the network, to look at.

    It is no part of the job: no keeper takes part, and the store hears nothing of it. Each rank is
    in a network namespace of its own that leads nowhere. Kill the processes when done. With --run
    they go on, as far as they come alone, and write to the files that they had open.
    """
    from gpustasis.criu.find import find
    from gpustasis.jobs import kept
    from gpustasis.jobs.records import Keys
    from gpustasis.jobs.replay import is_here
    from gpustasis.jobs.replay import replay as bring_back

    with open_store(options) as store:
        records = kept.records_of(kept.find_epoch(store, Keys(name), epoch))
    if wrong := [rank for rank in ranks if rank >= len(records)]:
        raise click.UsageError(f"--rank {wrong[0]}: must be 0 to {len(records) - 1}")
    chosen = [
        (rank, record)
        for rank, record in enumerate(records)
        if (rank in ranks if ranks else is_here(record))
    ]
    done = bring_back(name, chosen, find(criu_program), runs=runs)
    output.answer(
        {"job": name, "epoch": epoch, "ranks": [asdict(one) for one in done]},
        lambda: output.table(
            ("RANK", "PID", "DIRECTORY"), [(one.rank, one.pid, one.directory) for one in done]
        ),
    )


COMMANDS = (recoveries, fence, give_up, replay)


def keep_recovered(
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
    """Until the rank of a job that is recovered has ended."""
    from gpustasis.jobs.clock import by_the_clock
    from gpustasis.jobs.ending import Early
    from gpustasis.jobs.preempting import note_ended
    from gpustasis.jobs.supervise import Supervisor

    what, tell = f"job {context.place.job}, {context.name}", output.teller()
    recovering = _recovering(context, settings.ttl_s, choice, can_start=bool(words) or restore)
    with closing(recovering), Early() as early:
        supervisor = Supervisor(context, settings, tell, preempting, recovering)
        is_new = bool(words or restore) and not choice.standby
        if is_new and context.gate.is_held():  # a criu of the last start waits to be answered
            supervisor.settle()
        early.hold()  # a store that is away ends what follows, with an error
        starts = recovering.begin(new=is_new, can_start=bool(words), newest=newest)
        if words or restore or choice.standby:  # whoever has no seat replaces no other's addresses
            context.say_where()
        if starts:
            pid = supervisor.start(words, os.environ, early)
            tell(f"{what}: process {pid}, output in {context.place.log}")
        elif restore:
            tell(f"{what}: waits to be restored")
        command = (words, os.environ) if words else None
        with by_the_clock(context, periodic, tell, recovering.may_checkpoint):
            ended = supervisor.run(restoring=restore, command=command, early=early)
        if recovering.ended_well:  # a start without --restarts knows no lives
            note_ended(context, output.warn)
        return ended


def wait_a_moment() -> bool:
    """For who waits again and again; True: it goes on waiting."""
    time.sleep(_POLL_S)
    return True


def _is_next(guard: Guard, *, can_start: bool) -> bool:
    """A store that is away for a while is no reason not to stand by. can_start: there is a command,
    or it waits for a restore."""
    try:
        return guard.has_seat() and (can_start or guard.is_begun())
    except StoreError:
        return False


def _recovering(context: Context, ttl: int, choice: Choice, *, can_start: bool) -> Recovering:
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
        told=output.teller(),
        verify_s=context.options.check.seconds if context.options.check else 0.0,
    )
    while choice.standby and not _is_next(guard, can_start=can_start):
        wait_a_moment()
    watcher = None
    if choice.hang_after is not None:
        watcher = Watcher(choice.hang_after, place.log, choice.progress)
    return Recovering(context, guard, watcher, output.teller())
