# SPDX-License-Identifier: Apache-2.0
"""What it costs four ranks to agree: a checkpoint without faults that leaves them running, with
CRIU, emulated GPUs and TCP between network namespaces, against the slowest rank's own dump.
Whoever measures waits for the store's word: to ask again and again takes time from the ranks."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from statistics import median

from campaigns.job_faults import STEPS, STEPS_FIRST, Place
from campaigns.tally import Tally
from gpustasis.jobs import epochs
from gpustasis.jobs.dumps import record_of
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.records import Keys, Plan
from gpustasis.jobs.store import Store
from support.ring import WORLD, Ring
from support.ring_faults import end_all

BOUND_MS = 150
LIMIT_S = 60.0
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Cost:
    """In ms. commit: from the order to the decision. dump: the slowest rank's own, from the start
    of its criu until all was dumped. back: from the decision until all ranks run on."""

    commit: int
    dump: int
    back: int

    @property
    def beyond(self) -> int:
        """Of all until the decision, what was not the slowest rank's dump."""
        return self.commit - self.dump


def measure(ring: Ring, client: Store) -> Cost:
    """One checkpoint. Raises AssertionError if it is not committed, or a rank does not go on."""
    keys = Keys(ring.name)
    begin = time.monotonic()
    number = epochs.begin(client, keys, Plan(world=WORLD, leave_running=True))
    with closing(client.watch(keys.phase(number), client.read().revision)) as watch:
        while not (epoch := epochs.phase(client, keys, number)[0]).phase.is_final:
            watch.wait(LIMIT_S)
            assert time.monotonic() < begin + LIMIT_S, ring.logs()
    decided = time.monotonic()
    assert epoch.phase is Phase.COMMITTED, f"{epoch}\n{ring.logs()}"
    while len((found := epochs.standing(client, keys, number)).settled) < WORLD:
        assert time.monotonic() < decided + LIMIT_S, ring.logs()
        time.sleep(POLL_S)
    back = time.monotonic()
    assert found.is_whole, f"{found}\n{ring.logs()}"
    assert not any(found.problems.values()), f"{found.problems}\n{ring.logs()}"
    dumps = [record_of(text, f"rank {rank}").dump_ms for rank, text in found.records.items()]
    ring.wait_for_progress()
    return Cost(
        commit=round(1000 * (decided - begin)),
        dump=max(dumps),
        back=round(1000 * (back - decided)),
    )


def run(place: Place, rounds: int, bound_ms: int) -> Tally:
    """So many checkpoints of one job. A failure: the median is beyond the bound."""
    tally = Tally()
    costs: list[Cost] = []
    with place.ring(STEPS) as (ring, store):
        client = store.client()
        try:
            ring.start_all()
            ring.wait(lambda: min(ring.steps_now()) > STEPS_FIRST)
            for _ in range(rounds):
                tally.counts["trials"] += 1
                costs.append(measure(ring, client))
        finally:
            client.close()
            end_all(ring)
    for name in ("commit", "dump", "beyond", "back"):
        values = sorted(getattr(cost, name) for cost in costs)
        for word, value in (("least", values[0]), ("median", median(values)), ("most", values[-1])):
            tally.counts[f"{name}: {word}, ms"] = round(value)
    if (found := tally.counts["beyond: median, ms"]) > bound_ms:
        tally.failures.append(f"{found} ms beyond the slowest rank's dump, the bound is {bound_ms}")
    return tally
