# SPDX-License-Identifier: Apache-2.0
"""How long jobs of 16 to 16,384 ranks need to commit, and what they ask of etcd: the code that
runs, on a virtual clock (support/job_scale.py), with rates that are measured with a real etcd.

`ci/soak job-scale` runs it. `python -m campaigns.job_scale DIRECTORY` writes job-scale.svg and the
table for docs/reliability.md there.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from campaigns.tally import Tally
from gpustasis.jobs.etcd import Etcd
from gpustasis.jobs.etcd_words import Access
from gpustasis.jobs.member import Settings
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.store import Put, Require
from support.etcd import EtcdCluster
from support.job_scale import Scale
from support.played_etcd import Rates

SIZES = (16, 64, 256, 1024, 4096, 16_384)
WHAT_IF = Rates(writes=10_000, reads=17_000, keeps=28_000, events=50_000, entries=400_000)
PART = 0.5  # of etcd's writes are for the job
KEY = "/gpustasis/rates/"
PROCESSES, THREADS = 2, 16
MEASURE_S = 2.0
WATCHES, CHANGES = 128, 20
ENTRIES = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One job. commit_s: from the beginning to the decision, less the dump."""

    ranks: int
    rates: str
    committed: bool
    commit_s: float
    calls: dict[str, int]
    longest_s: float
    ttl_s: int


def run(_: Any) -> Iterator[tuple[str, Tally]]:
    """For ci/soak."""
    for name, rates in (("measured", measure()), ("10,000 writes/s", WHAT_IF)):
        tally = Tally()
        for ranks in SIZES:
            row = one(ranks, name, rates)
            tally.counts["trials"] += 1
            tally.counts["committed"] += row.committed
            if not row.committed or row.calls.get("timeouts"):
                tally.failures.append(str(row))
        yield f"etcd: {name}", tally


def one(ranks: int, name: str, rates: Rates) -> Row:
    settings = settings_for(ranks, rates)
    scale = Scale(ranks, rates, settings)
    load = scale.run()
    assert scale.epoch is not None
    return Row(
        ranks=ranks,
        rates=name,
        committed=scale.epoch.phase is Phase.COMMITTED,
        commit_s=scale.decided_s - scale.dump_s,
        calls=dict(load.decided),
        longest_s=load.longest_s,
        ttl_s=settings.ttl_s,
    )


def settings_for(ranks: int, rates: Rates) -> Settings:
    """As docs/jobs.md says for many ranks."""
    ttl_s = max(10, round(20 * ranks / rates.writes))
    return Settings(ttl_s=ttl_s, store_s=0.8 * ttl_s, writes_per_s=PART * rates.writes)


def measure() -> Rates:
    """A real etcd, alone, on this machine, with clients of ours beside it."""
    with tempfile.TemporaryDirectory() as directory:
        cluster = EtcdCluster(Path(directory))
        try:
            cluster.wait()
            url = cluster.endpoints[0]
            return Rates(
                writes=_each_second(url, "write"),
                reads=_each_second(url, "read"),
                keeps=_each_second(url, "keep"),
                events=_events(url),
                entries=_entries(url),
            )
        finally:
            cluster.close()


def _client(url: str) -> Etcd:
    return Etcd(Access(endpoints=(url,), timeout_s=30))


def _each_second(url: str, what: str) -> float:
    context = multiprocessing.get_context("spawn")
    done = context.Queue()
    processes = [
        context.Process(target=_ask_on, args=(url, what, number, done))
        for number in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    count = sum(done.get() for _ in processes)
    for process in processes:
        process.join()
    return float(count / MEASURE_S)


def _ask_on(url: str, what: str, number: int, done: Any) -> None:
    barrier = threading.Barrier(THREADS)
    counts: list[int] = []

    def ask(thread: int) -> None:
        store = _client(url)
        lease = store.grant(60)
        key = f"{KEY}{number}-{thread}"
        calls: dict[str, Callable[[], Any]] = {
            "write": lambda: store.write([Require(KEY + "none", 0)], [Put(key, "x" * 100, lease)]),
            "read": lambda: store.read(key, KEY + "none"),
            "keep": lambda: store.keep(lease),
        }
        count = 0
        barrier.wait()
        end = time.monotonic() + MEASURE_S
        while time.monotonic() < end:
            calls[what]()
            count += 1
        counts.append(count)
        store.close()

    threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.put(sum(counts))


def _events(url: str) -> float:
    store = _client(url)
    key = KEY + "watched"
    after = store.read(key).revision
    watches = [store.watch(key, after) for _ in range(WATCHES)]
    begin = time.monotonic()
    last = 0
    for number in range(CHANGES):
        last = store.write([], [Put(key, str(number))]).revision
    for watch in watches:
        while not any(change.revision >= last for change in watch.wait(30)):
            pass
    took_s = time.monotonic() - begin
    store.close()
    return WATCHES * CHANGES / took_s


def _entries(url: str) -> float:
    store = _client(url)
    for number in range(ENTRIES):
        store.write([], [Put(f"{KEY}many/{number}", "r" * 600)])
    begin = time.monotonic()
    found = store.read(KEY + "many/")
    took_s = time.monotonic() - begin
    assert len(found.entries) == ENTRIES
    store.close()
    return ENTRIES / took_s


def table(rows: list[Row]) -> str:
    heads = ["ranks", "etcd", "time to commit, s", "writes", "reads", "leases kept"]
    heads += ["watch events", "longest wait, s", "`ttl_s`"]
    rules = ["---" if head == "etcd" else "---:" for head in heads]
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, rules)]
    for row in rows:
        calls = [f"{row.calls.get(kind, 0):,}" for kind in ("writes", "reads", "keeps", "events")]
        took = f"{row.commit_s:.2f}" if row.committed else "aborted"
        cells = [f"{row.ranks:,}", row.rates, took, *calls, f"{row.longest_s:.2f}", str(row.ttl_s)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(rows: list[Row], path: Path) -> None:
    """Time to commit, and what is asked of etcd, against ranks."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "gpustasis"  # the same figures give the same file
    mpl.rcParams["svg.fonttype"] = "none"
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    times, loads = figure.subplots(1, 2)
    for name in dict.fromkeys(row.rates for row in rows):
        mine = [row for row in rows if row.rates == name and row.committed]
        ranks = [row.ranks for row in mine]
        times.plot(ranks, [row.commit_s for row in mine], marker="o", label=f"etcd: {name}")
    first = [row for row in rows if row.rates == rows[0].rates]
    kinds = {"writes": "writes", "reads": "reads", "keeps": "leases kept", "events": "watch events"}
    for kind, label in kinds.items():
        shown = [(row.ranks, row.calls[kind]) for row in first if row.calls.get(kind)]
        loads.plot(*zip(*shown, strict=True), marker="o", label=label)
    times.set_title("time to commit, less the dump, s", fontsize=10)
    loads.set_title(f"requests and events until the decision (etcd: {rows[0].rates})", fontsize=10)
    for axes in (times, loads):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(SIZES, [f"{size:,}" for size in SIZES])
        axes.set_xlabel("ranks")
        axes.grid(alpha=0.3, which="major")
        axes.legend()
    figure.suptitle("One epoch on a virtual clock, with the keepers' own code", fontsize=11)
    figure.savefig(path, metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"), dpi=110)


def main() -> None:
    directory = Path(sys.argv[1])
    gc.disable()  # what is simulated stays until the end
    measured = measure()
    print(asdict(measured), flush=True)
    name = f"{measured.writes:,.0f} writes/s, measured"
    rows = []
    for label, rates in ((name, measured), ("10,000 writes/s, assumed", WHAT_IF)):
        for ranks in SIZES:
            rows.append(one(ranks, label, rates))
            print(rows[-1], flush=True)
    (directory / "job-scale.md").write_text(table(rows), encoding="utf-8")
    draw(rows, directory / "job-scale.svg")


if __name__ == "__main__":
    main()
