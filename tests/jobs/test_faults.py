# SPDX-License-Identifier: Apache-2.0
"""A short, seeded part of the campaign in which each part of a job fails in each phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

import pytest

from campaigns import job_cost, job_faults, recovery
from soak import job_table
from support.criu_roots import criu_versions
from support.ring import Network
from support.ring_faults import CASES, GROUPS, Fault, Moment, planned
from support.ring_stores import AgentStore, EtcdStore

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"
SHORT = {
    "etcd": [
        (Fault.REFUSES, Moment.LOOK),
        (Fault.LINK, Moment.LOCK_NETWORK),
        (Fault.KEEPER, Moment.DUMP),
        (Fault.SCRIPT, Moment.DECIDED),
    ],
    "agent": [(Fault.STORE, Moment.LOCK_CUDA), (Fault.DISK, Moment.DUMP)],
}


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    network = Network()
    yield network
    network.close()


MakePlace = Callable[[str], job_faults.Place]


@pytest.fixture
def make_place(
    network: Network,
    compile_cuda: Callable[..., Path],
    emulator_environ: dict[str, str],
    tmp_path: Path,
) -> MakePlace:
    """By the name of its store."""
    criu = criu_versions()[-1]
    tmp_path.chmod(0o700)

    def make_store(store: str, directory: Path) -> EtcdStore | AgentStore:
        if store == "etcd":
            return EtcdStore(directory, network.host)
        return AgentStore(directory, emulator_environ, criu)

    return lambda store: job_faults.Place(
        directory=tmp_path,
        network=network,
        program=compile_cuda(PROGRAMS / "ring_rank.c"),
        environ=emulator_environ,
        criu=str(criu.root or criu.program),
        make_store=partial(make_store, store),
    )


@pytest.mark.parametrize("store", SHORT)
def test_all_are_committed_or_all_run_on(store: str, make_place: MakePlace) -> None:
    tally = job_faults.run(make_place(store), Random(store), SHORT[store], tries=6)
    tally.require_clean()
    assert tally.counts["last whole checkpoint restored"] == 1


@pytest.mark.timeout(900)
@pytest.mark.parametrize("store", ["etcd", "agent"])
def test_a_job_is_recovered_at_random_steps(store: str, make_place: MakePlace) -> None:
    # On a busy machine commands take longer, while the job runs; and connections that were locked
    # for some seconds may stand still for some more.
    terms = recovery.Terms(steps=12_000, hang_after_s=12, recovered_s=120.0, end_s=240.0)
    tally = recovery.run(make_place(store), Random(store), recovery.planned(1), terms)
    tally.require_clean()
    assert tally.counts["jobs that ended as an uninterrupted one"] == 1
    for fault in recovery.Fault:
        assert tally.counts[f"{fault}: recovered"] == 1


@pytest.mark.parametrize("store", ["etcd", "agent"])
def test_what_agreeing_costs_is_measured(store: str, make_place: MakePlace) -> None:
    tally = job_cost.run(make_place(store), 2, bound_ms=0)
    assert tally.trials == 2
    beyond = tally.counts["beyond: median, ms"]
    assert tally.counts["commit: median, ms"] > tally.counts["dump: median, ms"] > 0
    assert tally.failures == [f"{beyond} ms beyond the slowest rank's dump, the bound is 0"]


def test_each_fault_is_aimed_at_each_phase_that_it_can_meet() -> None:
    assert {fault for fault, _ in CASES} == set(Fault)
    for fault in (Fault.RANK, Fault.KEEPER, Fault.STORE, Fault.LINK, Fault.DISK):
        assert {moment for other, moment in CASES if other is fault} == set(Moment)
    assert sorted(moment for group in GROUPS for moment in group) == sorted(Moment)


def test_each_fault_is_planned_often_enough() -> None:
    plan = Counter(planned(20))
    assert set(plan) == set(CASES)
    assert plan.total() >= 300
    for fault in Fault:
        for group in GROUPS:
            if any((fault, moment) in CASES for moment in group):
                assert sum(plan[fault, moment] for moment in group) >= 20


def test_the_report_has_what_was_counted(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- job-faults -->\nold\n<!-- end of job-faults -->\nafter\n")
    machine = {"date": "d", "criu": ["4.3"], "emulated_driver": "580", "kernel": "6"}
    counts = {"criu killed in dump: aborted": 7, "criu killed in dump: committed": 2}
    part = {"part": "criu 4.3, etcd", "trials": 12, "failures": [], "counts": counts}
    found = {"seed": 1, "machine": machine, "campaigns": {"job-faults": [part]}}
    job_table.write(page, found)
    job_table.write(page, found)
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "| criu killed | - | - | - | 2 + 7 | 0 + 0 |" in lines
    assert "old" not in lines
    page.write_text("no comments\n")
    with pytest.raises(ValueError, match="no place"):
        job_table.write(page, found)
