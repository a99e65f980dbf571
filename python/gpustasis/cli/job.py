# SPDX-License-Identifier: Apache-2.0
"""`gpustasis job`: checkpoints of whole jobs, whose ranks agree on them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from gpustasis.cli import output
from gpustasis.cli.framework import Group
from gpustasis.cli.job_options import open_store, store_options
from gpustasis.cli.job_order import hold
from gpustasis.cli.job_recovery import COMMANDS
from gpustasis.cli.job_run import run
from gpustasis.cli.options import threads_option
from gpustasis.errors import JobError, VerificationError
from gpustasis.text import mib, plural

if TYPE_CHECKING:
    from gpustasis.jobs.records import Keys
    from gpustasis.jobs.store import Store

_SHOWN = 16  # characters of a digest

_epoch_option = click.option(
    "--epoch",
    type=click.IntRange(1),
    metavar="E",
    help="Number of the checkpoint, as `job list` has it.  [default: the newest whole checkpoint]",
)

_look_limit_option = click.option(
    "--look-limit",
    type=click.FloatRange(min=0.1),
    default=30.0,
    show_default=True,
    metavar="S",
    help="Seconds after which the epoch is aborted if a rank has not joined.",
)


@click.group("job", cls=Group)
def command() -> None:
    """Checkpoint and restore a job of several ranks: all of them, or none."""


command.add_command(run)
for _one in COMMANDS:
    command.add_command(_one)


@command.command("checkpoint")
@click.argument("name")
@click.option(
    "--world",
    type=click.IntRange(1),
    metavar="N",
    help="How many ranks the job has.  [default: as last time]",
)
@click.option("-R", "--leave-running", is_flag=True, help="The job runs on afterwards.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1),
    default=3600.0,
    show_default=True,
    metavar="S",
    help="Seconds after which the checkpoint is aborted if it is not decided.",
)
@_look_limit_option
@store_options
def checkpoint(
    name: str,
    world: int | None,
    leave_running: bool,
    timeout_s: float,
    look_limit: float,
    **options: Any,
) -> None:
    """Checkpoint job NAME: every rank's dump is in it, or every rank runs on.

    Each rank has a `gpustasis job run`, which does the work. The job ends, unless it is left
    running. Ends with status 19 if the checkpoint was aborted, or if it is committed and a rank has
    not done its part yet: `state` in --json says which.
    """
    from gpustasis.jobs.records import Keys, Plan

    with open_store(options) as store:
        keys = Keys(name)
        if world is None:
            world = _world(store, keys)
        plan = Plan(world=world, leave_running=leave_running)
        hold(store, keys, plan, timeout_s, look_limit)


@command.command("restore")
@click.argument("name")
@_epoch_option
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1),
    default=3600.0,
    show_default=True,
    metavar="S",
    help="Seconds after which nothing is restored if not all ranks are back.",
)
@click.option(
    "--older-if-unverified",
    is_flag=True,
    help="If the --verify-after of a keeper fails, restore the next older whole checkpoint; the "
    "keepers need this option, too.",
)
@_look_limit_option
@store_options
def restore(
    name: str,
    epoch: int | None,
    timeout_s: float,
    older_if_unverified: bool,
    look_limit: float,
    **options: Any,
) -> None:
    """Restore job NAME from a whole checkpoint: every rank runs again, or none does.

    Each rank needs a `gpustasis job run --restore`, on the host where its dump is and in the
    network namespace that it had; they wait for this command. No rank runs before all are back.
    Ends with status 19 if nothing was restored, or if a rank has not done its part yet; with 24 if
    the job was restored and killed again, for it was not verified.
    """
    from gpustasis.jobs.kept import find_epoch, next_to_try
    from gpustasis.jobs.records import Keys, Plan
    from gpustasis.jobs.steering import require_no_recovery

    with open_store(options) as store:
        keys = Keys(name)
        require_no_recovery(store, keys)
        found = find_epoch(store, keys, epoch)
        while True:
            plan = Plan(world=found.plan.world, leave_running=True, restores=found.number)
            try:
                return hold(store, keys, plan, timeout_s, look_limit)
            except VerificationError as exc:
                after = next_to_try(store, keys, found) if older_if_unverified else None
                if after is None:
                    raise
                output.warn(f"{exc}; epoch {after.number} is tried")
                found = after


@command.command("list")
@click.argument("name", required=False)
@store_options
def list_(name: str | None, **options: Any) -> None:
    """List the epochs of job NAME, oldest first; without NAME all jobs."""
    from gpustasis.jobs import kept
    from gpustasis.jobs.records import Keys

    with open_store(options) as store:
        names = kept.jobs(store) if name is None else [name]
        found = [(one, epoch) for one in names for epoch in kept.all_epochs(store, Keys(one))]
        wrong = {one: kept.unverified(store, Keys(one)) for one in names}
    rows = [
        {
            "job": job,
            "epoch": one.number,
            "kind": kept.kind_of(one),
            "restores": one.plan.restores or None,
            "state": kept.state_of(one),
            "whole": one.is_whole,
            "world": one.plan.world,
            "leave_running": one.plan.leave_running,
            "settled": len(one.settled),
            "note": wrong[job].get(one.number, "") if one.is_whole else one.epoch.note,
        }
        for job, one in found
    ]
    titles = ("JOB", "EPOCH", "KIND", "STATE", "RANKS", "NOTE")
    words = ("job", "epoch", "kind", "state", "world")

    def note(row: dict[str, Any]) -> str:
        """For people: which checkpoint a restore has brought back, in place of a digest."""
        is_done = row["restores"] and row["state"] == "committed"
        return f"of epoch {row['restores']}" if is_done else str(row["note"])

    output.answer(
        {"epochs": rows},
        lambda: output.table(
            titles, [[*(row[word] or "-" for word in words), note(row) or "-"] for row in rows]
        ),
    )


@command.command("show")
@click.argument("name")
@_epoch_option
@store_options
def show(name: str, epoch: int | None, **options: Any) -> None:
    """Say what a whole checkpoint of job NAME holds: where each rank's dump is, and what it is."""
    from gpustasis.jobs import kept
    from gpustasis.jobs.records import Keys

    with open_store(options) as store:
        found = kept.find_epoch(store, Keys(name), epoch)
        records = kept.records_of(found)
    titles = ("RANK", "HOST", "SIZE", "DIGEST", "CONNECTIONS", "COPY", "DIRECTORY")
    rows = [
        (
            *(str(rank), one.host, mib(one.bytes), one.digest[:_SHOWN]),
            *(len(one.network.connections), one.peer or "-", one.directory),
        )
        for rank, one in enumerate(records)
    ]
    fields = [
        {"rank": rank, **asdict(one), "network": one.network.to_json()}
        for rank, one in enumerate(records)
    ]
    output.answer(
        {"job": name, "epoch": found.number, "digest": found.epoch.note, "ranks": fields},
        lambda: output.table(titles, rows),
    )


@command.command("verify")
@click.argument("name")
@_epoch_option
@threads_option
@store_options
def verify(name: str, epoch: int | None, threads: int, **options: Any) -> None:
    """Check that a checkpoint of job NAME is whole, and every byte of the dumps on this host.

    Dumps on other hosts are named, and not looked at: run it there, too. Ends with status 19 if
    something is wrong.
    """
    from gpustasis.jobs import kept
    from gpustasis.jobs.records import Keys

    with open_store(options) as store:
        found = kept.find_epoch(store, Keys(name), epoch)
        checked = kept.verify(found, threads)
    fields = [
        {
            "rank": one.rank,
            "host": one.record.host,
            "directory": one.record.directory,
            "checked": one.problems is not None,
            "problems": one.problems or [],
        }
        for one in checked
    ]

    def tell() -> None:
        for one in checked:
            if one.problems is None:
                output.say(f"rank {one.rank}: on {one.record.host}, not looked at")
            for problem in one.problems or []:
                output.say(f"rank {one.rank}: {problem}")
        looked = sum(one.problems is not None for one in checked)
        output.say(
            f"job {name}, epoch {found.number}: whole; {looked} of {len(checked)} dumps read"
        )

    output.answer({"job": name, "epoch": found.number, "ranks": fields}, tell)
    wrong = sum(len(one.problems or []) for one in checked)
    if wrong:
        raise JobError(f"job {name}, epoch {found.number}: {plural(wrong, 'problem')}")


@command.command("prune")
@click.argument("name")
@click.option(
    "--keep-last",
    type=click.IntRange(1),
    required=True,
    metavar="N",
    help="Keep the newest N whole checkpoints.",
)
@store_options
def prune(name: str, keep_last: int, **options: Any) -> None:
    """Remove old checkpoints of job NAME; the newest whole one always stays.

    Dumps on this host are removed. Those on others go when this is run there.
    """
    from gpustasis.jobs import kept
    from gpustasis.jobs.records import Keys

    with open_store(options) as store:
        done = kept.prune(store, Keys(name), keep_last)

    def tell() -> None:
        for one in done:
            here = plural(len(one.directories), "dump")
            output.say(f"job {name}, epoch {one.epoch}: pruned, {here} removed here")

    output.answer({"job": name, "epochs": [asdict(one) for one in done]}, tell)


def _world(store: Store, keys: Keys) -> int:
    """As in the newest epoch that was decided for: one with a wrong number is aborted. Else as in
    the newest."""
    from gpustasis.jobs import epochs
    from gpustasis.jobs.messages import Phase
    from gpustasis.jobs.records import number_of

    newest = number_of(keys.newest, store.read(keys.newest).entries.get(keys.newest))
    if not newest:
        raise JobError(f"job {keys.job} has no epoch yet: say by --world how many ranks it has")
    found = [epochs.phase(store, keys, number) for number in range(newest, 0, -1)]
    committed = (plan for epoch, plan in found if epoch.phase is Phase.COMMITTED)
    return next(committed, found[0][1]).world
