# SPDX-License-Identifier: Apache-2.0
"""An order that the ranks of a job carry out: begun, watched, and told of in the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from gpustasis.cli import output
from gpustasis.errors import CheckpointError, JobError, VerificationError
from gpustasis.text import plural

if TYPE_CHECKING:
    from gpustasis.jobs.epochs import Standing
    from gpustasis.jobs.records import Keys, Plan
    from gpustasis.jobs.store import Store

_POLL_S = 0.02
_RELEASE_S = 60.0  # for the ranks of an aborted epoch to run on
_VERDICT_S = 10.0  # for the keepers to say that the job is not back
_SHOWN = 16  # ranks


def hold(store: Store, keys: Keys, plan: Plan, timeout_s: float, look_limit: float) -> None:
    """Begin an epoch, show how far its ranks are, and see that it is done. Raises JobError if it is
    aborted; VerificationError if the job is not back; StoreError."""
    from gpustasis.jobs import epochs, verified
    from gpustasis.jobs.messages import Phase
    from gpustasis.jobs.store import Unreachable

    begin = time.monotonic()
    number = epochs.begin(store, keys, plan)
    what = f"job {keys.job}, epoch {number}"
    found = epochs.standing(store, keys, number)
    decided = 0.0
    joined: set[int] = set()
    with output.status(what) as update, _withdrawn(store, keys, number):
        while True:
            with suppress(Unreachable):  # the ranks decide without us
                found = epochs.standing(store, keys, number)
                steps = epochs.steps(store, keys, number, plan.world)
                joined |= steps.keys()
                update(partial(_progress, what, found, steps))
                reason = _too_late(found, steps, time.monotonic() - begin, timeout_s, look_limit)
                if reason:
                    epochs.abort(store, keys, number, reason)
            if found.epoch.phase.is_final:
                decided = decided or time.monotonic()
                is_committed = found.epoch.phase is Phase.COMMITTED
                waited_for = set(range(plan.world)) if is_committed else joined
                limit = timeout_s if is_committed else _RELEASE_S
                if waited_for <= found.settled or time.monotonic() > decided + limit:
                    break
            time.sleep(_POLL_S)
    if plan.restores and any(found.problems.values()):
        because = verified.verdict(store, keys, number, _VERDICT_S)
        if because:
            raise VerificationError(
                f"{what}: epoch {plan.restores} was restored, but job {keys.job} is not back: "
                f"{because}; every rank with --verify-after was killed"
            )
    _tell(keys, found, time.monotonic() - begin)


@contextmanager
def _withdrawn(store: Store, keys: Keys, number: int) -> Iterator[None]:
    """An order that nobody waits for any more must not be carried out later, when its ranks come:
    it is aborted, if no rank has been locked for it."""
    from gpustasis.jobs import epochs
    from gpustasis.jobs.messages import Phase

    try:
        yield
    except BaseException:
        with suppress(CheckpointError):  # whatever has ended us is told
            if epochs.phase(store, keys, number)[0].phase is Phase.LOOK:
                epochs.abort(store, keys, number, "whoever asked has gone")
        raise


def _too_late(
    found: Standing, steps: dict[int, str], seconds: float, timeout_s: float, look_limit: float
) -> str:
    """Why the epoch has to be aborted from here; empty: it has not."""
    from gpustasis.jobs.messages import Phase

    if found.epoch.phase.is_final:
        return ""
    missing = [rank for rank in range(found.plan.world) if rank not in steps]
    if found.epoch.phase is Phase.LOOK and missing and seconds > look_limit:
        ranks = ", ".join(map(str, missing[:_SHOWN]))
        return f"{plural(len(missing), 'rank')} not joined within {look_limit:g} s: {ranks}"
    return f"not decided within {timeout_s:g} s" if seconds > timeout_s else ""


def _progress(what: str, found: Standing, steps: dict[int, str]) -> str:
    ranks = ", ".join(
        f"{rank}: {'dumped' if rank in found.records else steps.get(rank, '-')}"
        for rank in range(min(found.plan.world, _SHOWN))
    )
    return f"{what}: {found.epoch.phase} ({ranks})"


def _tell(keys: Keys, found: Standing, seconds: float) -> None:
    from gpustasis.jobs.messages import Phase

    job, number = keys.job, found.number
    kind = "restored" if found.plan.restores else "checkpointed"
    missing = sorted(set(range(found.plan.world)) - found.settled)
    fields = {
        "job": job,
        "epoch": number,
        "restores": found.plan.restores or None,
        "state": str(found.epoch.phase),
        "world": found.plan.world,
        "leave_running": found.plan.leave_running,
        "seconds": round(seconds, 3),
        "ranks": [
            {"rank": rank, "dumped": rank in found.records, "problem": found.problems.get(rank, "")}
            for rank in range(found.plan.world)
        ],
    }
    if found.epoch.phase is Phase.ABORTED:
        output.answer(fields)
        hint = (
            "; each rank needs a `gpustasis job run`"
            if " not joined within " in found.epoch.note
            else ""
        )
        raise JobError(f"job {job}, epoch {number} was aborted: {found.epoch.note}{hint}")
    ranks = plural(found.plan.world, "rank")
    output.answer(
        fields, lambda: output.say(f"job {job} {kind}, epoch {number}: {ranks}, {seconds:.2f} s")
    )
    if wrong := [f"rank {rank}: {text}" for rank, text in sorted(found.problems.items()) if text]:
        raise JobError(f"job {job}, epoch {number} is committed, but: {'; '.join(wrong)}")
    if missing:
        raise JobError(
            f"job {job}, epoch {number} is committed, but not yet done by ranks "
            f"{', '.join(map(str, missing))}: their keepers do it when they are there again"
        )
