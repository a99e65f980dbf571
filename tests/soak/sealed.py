# SPDX-License-Identifier: Apache-2.0
"""Campaigns of sealed and of packed checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from campaigns import kill_points, markers, streams, tampering
from campaigns.tally import Tally
from gpustasis.criu.plugin import Setting
from soak.bench import KILLS, KILLS_EACH_PHASE, KILLS_WITH_WORKER, STREAMS_BROKEN, Bench
from support.recipients import make_recipient

MARKED_KILLS = 200  # of dumps, and half as many of restores
BYTES_RESTORED, BYTES_RESTORED_OTHERS = 60, 10  # of each file


def kill_sealed(bench: Bench) -> Iterator[tuple[str, Tally]]:
    for rig in bench.rigs:
        sealed = tampering.sealed_for(make_recipient(rig.images()))
        packed: dict[str, Setting] = {"cpu_memory": "ours", "layout": "packed"}
        for name, settings, with_worker in (
            ("packed", packed, False),
            ("sealed", sealed, False),
            ("sealed, worker killed too", sealed, True),
        ):
            part = f"criu {rig.criu.version_text}, {name}"
            yield (
                part,
                kill_points.run(
                    rig,
                    bench.random(f"kill-sealed {part}"),
                    KILLS_WITH_WORKER if with_worker else KILLS,
                    with_worker=with_worker,
                    each=0 if with_worker else KILLS_EACH_PHASE,
                    shape=kill_points.LARGE_ALL,
                    settings=settings,
                ),
            )


def search_markers(bench: Bench) -> Iterator[tuple[str, Tally]]:
    for rig in bench.rigs:
        newest = rig is bench.newest
        sealed = tampering.sealed_for(make_recipient(rig.images()))
        for cpu_memory in ("ours", "criu") if newest else ("ours",):
            part = f"criu {rig.criu.version_text}, cpu_memory = {cpu_memory}"
            random = bench.random(f"markers {part}")
            settings = sealed | {"cpu_memory": cpu_memory}
            kills = MARKED_KILLS if newest else MARKED_KILLS // 4
            yield part, markers.run(rig, random, settings, kills, whole=True)


def tamper(bench: Bench) -> Iterator[tuple[str, Tally]]:
    rig = bench.newest
    pair = make_recipient(rig.images(), kind="SECP256R1")
    for live in (True, False):
        part = f"every byte, {'sealed while it is made' if live else 'sealed when finished'}"
        random = bench.random(f"tampering {part}")
        yield part, tampering.run_unseal(rig, random, pair, 0, live=live)
    for rig in bench.rigs:
        count = BYTES_RESTORED if rig is bench.newest else BYTES_RESTORED_OTHERS
        for sealed in (True, False):
            part = f"criu {rig.criu.version_text}, {'sealed' if sealed else 'packed'}"
            random = bench.random(f"tampering {part}")
            clear = 0 if rig is bench.newest else count
            tally = tampering.run_restores(rig, random, pair, count, sealed=sealed, clear=clear)
            yield part, tally


def break_streams(bench: Bench) -> Iterator[tuple[str, Tally]]:
    for rig in bench.rigs:
        version = f"criu {rig.criu.version_text}"
        pair = make_recipient(rig.scratch, "streams")
        random = bench.random(f"sealed-streams {version}")
        yield version, streams.run(rig, random, STREAMS_BROKEN, pair=pair)
