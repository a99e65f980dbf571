# SPDX-License-Identifier: Apache-2.0
"""Which campaigns there are, how long, and with which CRIU."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random

from campaigns import (
    archives,
    bit_flips,
    chain_kills,
    chains,
    damage,
    driver_faults,
    hook_cost,
    job_cost,
    job_scale,
    kill_points,
    kill_restore,
    large_streams,
    plans,
    repetition,
    space,
    streams,
    tar_readers,
    whole_trees,
)
from campaigns.rig import Rig, with_config, with_driver
from campaigns.tally import Tally
from soak import direct, job_faults, keepers, ram, sealed
from soak.bench import KILLS, KILLS_EACH_PHASE, KILLS_WITH_WORKER, STREAMS_BROKEN, Bench, Campaign
from support.archives import pack
from support.elsewhere import Elsewhere
from support.recipients import make_recipient
from support.tar_readers import build_go_reader

REPOSITORY = Path(__file__).resolve().parent.parent.parent
OTHER_DRIVERS = ("570.133.20", "595.58.03", "610.43.02")  # beside the one of all campaigns
KILLED_RESTORES = 60
FLIPS_RESTORED, CUTS_RESTORED = 260, 60
FLIPS_VERIFIED = 1000
DISK_SIZES, DISK_SIZES_OTHERS = 100, 25
DUMPS = 50
HOOK_CALLS = 20_000
HOOK_LIMIT_US = 50.0
KILLS_ON_PARENT = 60
KILLED_COMMANDS = 300
STORE_ROUNDS = 150
FUZZ_INPUTS = 1_000_000
ARCHIVES_CHANGED = 10_000
TARS_COMPARED = 100_000
JOBS_PLANNED = 60
LARGE_MIB = 4 << 10


def _kill_points(bench: Bench) -> Iterator[tuple[str, Tally]]:
    for rig in bench.rigs:
        version = f"criu {rig.criu.version_text}"
        random = bench.random(f"kill-points {version}")
        yield f"{version} with the plugin", _aimed_kills(rig, random)
        yield f"{version} stock", kill_points.run(rig, random, KILLS, plugin=False)
    for driver in OTHER_DRIVERS:
        with with_driver(bench.newest, driver) as rig:
            part = f"criu {rig.criu.version_text}, driver {driver}"
            yield part, _aimed_kills(rig, bench.random(f"kill-points {part}"))


def _kill_cpu_memory(bench: Bench) -> Iterator[tuple[str, Tally]]:
    for rig in bench.rigs:
        version = f"criu {rig.criu.version_text}"
        random = bench.random(f"kill-cpu-memory {version}")
        yield (
            version,
            kill_points.run(
                rig,
                random,
                KILLS,
                each=KILLS_EACH_PHASE,
                shape=kill_points.LARGE_CPU,
                settings={"cpu_memory": "ours"},
            ),
        )


def _aimed_kills(rig: Rig, random: Random) -> Tally:
    return kill_points.run(rig, random, KILLS, each=KILLS_EACH_PHASE, shape=kill_points.LARGE)


def _kill_with_worker(bench: Bench) -> Iterator[tuple[str, Tally]]:
    for rig in bench.rigs:
        version = f"criu {rig.criu.version_text}"
        random = bench.random(f"kill-with-worker {version}")
        yield version, kill_points.run(rig, random, KILLS_WITH_WORKER, with_worker=True)


def _kill_worker(bench: Bench) -> Iterator[tuple[str, Tally]]:
    tally = kill_points.run_worker_kills(bench.newest, bench.random("kill-worker"), KILLS)
    yield f"criu {bench.newest.criu.version_text}", tally


def _kill_restore(bench: Bench) -> Iterator[tuple[str, Tally]]:
    for rig in bench.rigs:
        version = f"criu {rig.criu.version_text}"
        random = bench.random(f"kill-restore {version}")
        yield version, kill_restore.run(rig, random, KILLED_RESTORES)
        ours = with_config(rig, {"cpu_memory": "ours", "layout": "packed"})
        all_kinds = {"children": 1, "plain_children": 1, "shared_mib": 2}
        checkpoint = damage.take(ours, mib=4, **all_kinds)
        part = f"{version}, with CPU memory and shared memory, packed"
        yield part, kill_restore.run(ours, random, KILLED_RESTORES, checkpoint)


def _full_disk(bench: Bench) -> Iterator[tuple[str, Tally]]:
    for rig in bench.rigs:
        version = f"criu {rig.criu.version_text}"
        sizes = DISK_SIZES if rig is bench.newest else DISK_SIZES_OTHERS
        yield version, space.run(rig, bench.random(f"full-disk {version}"), sizes)
    rig = bench.newest
    tally = space.run_disk(rig, bench.random("full-disk ext4"), DISK_SIZES_OTHERS)
    yield f"criu {rig.criu.version_text}, ext4", tally


def _damage(bench: Bench) -> Iterator[tuple[str, Tally]]:
    rig = bench.newest
    tally = damage.run(rig, bench.random("damage"), FLIPS_RESTORED, CUTS_RESTORED)
    yield f"criu {rig.criu.version_text}", tally


def _driver_faults(bench: Bench) -> Iterator[tuple[str, Tally]]:
    rig = bench.newest
    version = f"criu {rig.criu.version_text}"
    yield f"{version}, dump", driver_faults.run_dumps(rig)
    yield f"{version}, the way back", driver_faults.run_undos(rig)
    yield f"{version}, restore", driver_faults.run_restores(rig)


def _bit_flips(bench: Bench) -> Iterator[tuple[str, Tally]]:
    checkpoint = damage.take(bench.newest, mib=4, children=1)
    tally = bit_flips.run(checkpoint.images, bench.random("bit-flips"), FLIPS_VERIFIED)
    yield "gpustasis verify", tally


def _repetition(bench: Bench) -> Iterator[tuple[str, Tally]]:
    for rig in bench.rigs:
        yield f"criu {rig.criu.version_text}", repetition.run(rig, DUMPS)


def _hook_cost(bench: Bench) -> Iterator[tuple[str, Tally]]:
    cost, environ = bench.hook_cost, bench.newest.environ
    yield "per call", hook_cost.run(cost, environ, HOOK_CALLS, HOOK_LIMIT_US)


def _kill_on_parent(bench: Bench) -> Iterator[tuple[str, Tally]]:
    for rig in bench.rigs:
        version = f"criu {rig.criu.version_text}"
        random = bench.random(f"kill-on-parent {version}")
        by_worker, by_hand = chains.run_kills(rig, random, KILLS_ON_PARENT)
        yield version, by_worker
        yield f"{version}, worker killed too", by_hand


def _chains(bench: Bench) -> Iterator[tuple[str, Tally]]:
    for rig in bench.rigs:
        version = f"criu {rig.criu.version_text}"
        yield version, chains.run(rig, bench.random(f"chains {version}"), STORE_ROUNDS)


def _kill_store(bench: Bench) -> Iterator[tuple[str, Tally]]:
    rig, random = bench.newest, bench.random("kill-store")
    flattened = chain_kills.run_flatten(rig.programs.killer, rig.scratch, random, KILLED_COMMANDS)
    yield "gpustasis flatten", flattened
    yield (
        "gpustasis prune",
        chain_kills.run_prune(rig.programs.killer, rig.scratch, random, KILLED_COMMANDS),
    )


def _fuzz(bench: Bench) -> Iterator[tuple[str, Tally]]:
    ended = subprocess.run(
        [REPOSITORY / "ci" / "fuzz", str(FUZZ_INPUTS), str(bench.seed)],
        capture_output=True,
        text=True,
        check=False,
    )
    tally = Tally()
    found = re.search(r"^(\d+) inputs, 0 crashes$", ended.stdout, re.MULTILINE)
    if ended.returncode == 0 and found is not None:
        tally.counts["trials"] = int(found[1])
    else:
        tally.counts["trials"] = 1
        tally.failures.append(ended.stdout[-1000:] + ended.stderr[-3000:])
    yield "image reader, ASan and UBSan", tally


def _archives(bench: Bench) -> Iterator[tuple[str, Tally]]:
    scratch = bench.newest.images()
    sample = pack(damage.take(bench.newest, mib=1).images, scratch / "sample.tar").read_bytes()
    (scratch / "sample.tar").unlink()
    tally = archives.run(sample, scratch, bench.random("archives"), ARCHIVES_CHANGED)
    yield "inspect, verify and flatten", tally


def _tar_readers(bench: Bench) -> Iterator[tuple[str, Tally]]:
    scratch = bench.newest.images()
    program = build_go_reader(scratch)
    archives_made = scratch / "archives"
    archives_made.mkdir()
    random = bench.random("tar-readers")
    tally = tar_readers.run(program, archives_made, random, TARS_COMPARED)
    yield "ours, GNU tar and Go's", tally


def _streams(bench: Bench) -> Iterator[tuple[str, Tally]]:
    for rig in bench.rigs:
        version = f"criu {rig.criu.version_text}"
        yield version, streams.run(rig, bench.random(f"streams {version}"), STREAMS_BROKEN)
    rig = bench.newest
    part = f"criu {rig.criu.version_text}, with GPU memory"
    yield part, streams.run(rig, bench.random(f"streams {part}"), STREAMS_BROKEN, mib=8, children=1)


def _large_streams(bench: Bench) -> Iterator[tuple[str, Tally]]:
    with Elsewhere() as elsewhere:
        for rig in bench.rigs:
            for pair in (None, make_recipient(rig.images())):
                part = f"criu {rig.criu.version_text}, {'sealed' if pair else 'in the clear'}"
                yield part, large_streams.run(rig, elsewhere, LARGE_MIB, pair)


def _whole_trees(_: Bench) -> Iterator[tuple[str, Tally]]:
    for part, folder in (("criu", "integration"), ("Podman with runc and crun", "runtimes")):
        yield part, whole_trees.run_tests(REPOSITORY, f"{folder}/test_whole_tree.py")


def _plan(bench: Bench) -> Iterator[tuple[str, Tally]]:
    of_grid, of_chance = plans.run(bench.random("plan"), JOBS_PLANNED)
    yield "every case of the grid", of_grid
    yield "cases at random", of_chance


CAMPAIGNS: dict[str, tuple[str, Campaign]] = {
    "kill-points": (
        (
            "criu is killed with SIGKILL during a dump, "
            f"at least {KILLS_EACH_PHASE} times in each phase; no job may be lost"
        ),
        _kill_points,
    ),
    "kill-cpu-memory": (
        (
            "criu is killed with SIGKILL during a dump that stores CPU memory as well, "
            f"at least {KILLS_EACH_PHASE} times in each phase; no job may be lost"
        ),
        _kill_cpu_memory,
    ),
    "kill-sealed": (
        (
            "criu is killed with SIGKILL during dumps that are packed, and sealed, with CPU memory "
            f"and shared memory, at least {KILLS_EACH_PHASE} times in each phase; no job may be "
            "lost"
        ),
        sealed.kill_sealed,
    ),
    "kill-with-worker": (
        "criu and the plugin's worker are killed at once; `gpustasis recover` brings the job back",
        _kill_with_worker,
    ),
    "kill-worker": (
        "the plugin's worker alone is killed during a dump; the job runs on",
        _kill_worker,
    ),
    "kill-restore": (
        "criu is killed with SIGKILL during a restore; nothing may run on wrong memory",
        _kill_restore,
    ),
    **(direct.CAMPAIGNS | ram.CAMPAIGNS),
    "full-disk": (
        "the image directory is full, at each file and at many sizes; no job may be lost",
        _full_disk,
    ),
    "damage": ("our files are damaged, missing or cut; every restore must fail", _damage),
    "tampering": (
        (
            "each byte of a small sealed checkpoint is changed in turn, and frames and files are "
            "swapped, left out, repeated and taken from an earlier checkpoint of the same job, of "
            "packed ones too; all is refused, and nothing is left running"
        ),
        sealed.tamper,
    ),
    "markers": (
        (
            "while a job is dumped sealed and restored, and after each kill of that, no file that "
            "a path leads to holds what it has in memory, environment and arguments"
        ),
        sealed.search_markers,
    ),
    "driver-faults": (
        (
            "each driver call fails, hangs or kills the process; dumps and restores must fail "
            "cleanly. A process that the driver has killed, or never answers for again, is lost; "
            "the others of its tree must run on"
        ),
        _driver_faults,
    ),
    "bit-flips": ("single bits are flipped; `gpustasis verify` must find each", _bit_flips),
    "repetition": ("one job is dumped and left running again and again", _repetition),
    "hook-cost": ("the hooks of a dump, for a process without CUDA", _hook_cost),
    "kill-on-parent": (
        "criu is killed during dumps on top of a parent; the job comes back through the chain",
        _kill_on_parent,
    ),
    "chains": (
        "a store in daily use: dumps on parents, flatten, prune, deaths and restores",
        _chains,
    ),
    "kill-store": (
        "flatten and prune are killed at any system call; every checkpoint is whole or gone",
        _kill_store,
    ),
    "archives": ("checkpoint archives are changed at random; read or refused", _archives),
    "streams": (
        (
            "streams to another machine are cut, damaged and stopped, and either end is killed; "
            "the job runs at one end, or its checkpoint is named"
        ),
        _streams,
    ),
    "sealed-streams": (
        "the same of sealed streams: what arrives is opened, and checked, before the job ends",
        sealed.break_streams,
    ),
    "large-streams": (
        (
            f"jobs of {LARGE_MIB >> 10} GiB are sent, in the clear and sealed; the processes of "
            f"each end take at most {large_streams.MOST_MIB} MiB of memory together"
        ),
        _large_streams,
    ),
    "whole-trees": (
        (
            "fifty processes with threads, shared memory, memfds, pipes, files without a name "
            "and CUDA go there and back in each way with each CRIU; every byte is checked"
        ),
        _whole_trees,
    ),
    "keepers": (
        (
            "what keeps a rank of a distributed job is killed and cut off in each phase of a "
            "coordinated checkpoint, and so is etcd; all ranks are committed, or all run on"
        ),
        keepers.run,
    ),
    "job-faults": (
        (
            "in each phase of a checkpoint of four ranks with CRIU and emulated GPUs, criu, its "
            "script, a rank, a keeper and the store are killed, a link goes down, a disk is full, "
            "a rank is away or votes no; all are committed, or all run on, and the last whole "
            "checkpoint comes back"
        ),
        job_faults.run,
    ),
    "recovery": (
        (
            "at random steps of four ranks with CRIU and emulated GPUs a rank is killed, or all "
            "that runs in its namespace, or a rank hangs in a collective; the job is restored by "
            "itself, and ends with the sums of an uninterrupted run"
        ),
        job_faults.recover,
    ),
    "job-cost": (
        (
            "four ranks with CRIU and emulated GPUs agree on a checkpoint without faults; half of "
            f"the times take at most {job_cost.BOUND_MS} ms beyond the slowest rank's own dump"
        ),
        job_faults.measure,
    ),
    "plan": (
        (
            "jobs that fail are simulated, event by event; the planner's ETTR has to be within "
            f"{100 * plans.BOUND:.0f} % of what comes of them"
        ),
        _plan,
    ),
    "job-scale": (
        (
            "jobs of 16 to 16,384 ranks agree on a checkpoint, on a virtual clock, with rates of "
            "a real etcd; each is committed, and no request is answered too late"
        ),
        job_scale.run,
    ),
    "tar-readers": (
        "tar archives with odd headers; what our reader accepts, others read in the same way",
        _tar_readers,
    ),
    "fuzz": ("the image reader reads whatever libFuzzer thinks of", _fuzz),
}
