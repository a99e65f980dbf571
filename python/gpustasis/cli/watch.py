# SPDX-License-Identifier: Apache-2.0
"""`gpustasis watch PID`: how fast a job writes to its memory, and what follows for checkpoints."""

from __future__ import annotations

import time

import click

from gpustasis.cli import output
from gpustasis.cli.framework import Command
from gpustasis.planning.interval import young
from gpustasis.text import mib
from gpustasis.watching import (
    MIB,
    Meter,
    Sample,
    Watch,
    best_incremental_interval,
    incremental_bytes,
)

_SCOPE = "CPU memory only; GPU memory is not seen here: compare checkpoints, gpustasis diff"


@click.command("watch", cls=Command)
@click.argument("pid", type=click.IntRange(1))
@click.option(
    "--interval",
    type=click.FloatRange(0.01),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--duration", type=click.FloatRange(0.0), help="End after so many seconds.")
@click.option("--count", type=click.IntRange(1), help="End after so many looks.")
@click.option("--tree", is_flag=True, help="The processes that it has started, too.")
@click.option(
    "--backend",
    type=click.Choice(["auto", "write-protect", "soft-dirty"]),
    default="auto",
    show_default=True,
    help="How writes are seen.",
)
@click.option(
    "--mtbf",
    "mtbf_s",
    type=click.FloatRange(0.0, min_open=True),
    help="Mean seconds between failures of the job; gives the interval to choose.",
)
@click.option(
    "--cost",
    "cost_s",
    type=click.FloatRange(0.0, min_open=True),
    help="Seconds that a checkpoint stops the job.",
)
@click.option(
    "--bandwidth",
    "bandwidth_mib",
    type=click.FloatRange(0.0, min_open=True),
    help="MiB/s that a checkpoint is written with; the cost follows from it and the memory.",
)
def command(
    pid: int,
    interval: float,
    duration: float | None,
    count: int | None,
    tree: bool,
    backend: str,
    mtbf_s: float | None,
    cost_s: float | None,
    bandwidth_mib: float | None,
) -> None:
    """Show how fast process PID writes to its memory, and what follows for its checkpoints.

    Sees CPU memory only, not GPU memory: the driver's staging is new memory at each checkpoint. How
    fast GPU memory changes is found by comparing checkpoints: gpustasis diff.

    Ends with the process, with Ctrl-C, or as --duration and --count say. --json prints one object
    a line: one for each look, and a last one with the summary.
    """
    if mtbf_s is not None and cost_s is None and bandwidth_mib is None:
        raise click.UsageError("--mtbf needs --cost or --bandwidth")
    if mtbf_s is None and (cost_s is not None or bandwidth_mib is not None):
        raise click.UsageError("--cost and --bandwidth say nothing without --mtbf")
    if cost_s is not None and bandwidth_mib is not None:
        raise click.UsageError("give --cost or --bandwidth, not both")
    meter = Meter()

    def choice() -> tuple[float, float] | None:
        """(interval, cost) in seconds, if it was asked for."""
        if mtbf_s is None:
            return None
        if cost_s is not None:
            return young(cost_s, mtbf_s), cost_s
        assert bandwidth_mib is not None
        return best_incremental_interval(
            meter.mean_rate, meter.last.tracked_bytes, bandwidth_mib * MIB, mtbf_s
        )

    with Watch(pid, backend=backend, tree=tree) as watch:
        end = None if duration is None else time.monotonic() + duration
        reason = ""
        with output.live() as update:
            try:
                while not reason:
                    time.sleep(interval if end is None else _until(end, interval))
                    sample = watch.sample()
                    if sample is None:
                        reason = "the process has ended"
                        break
                    meter.add(sample)
                    output.stream({"look": _fields(sample, watch)})
                    update(f"process {pid}", _rows(meter, watch, choice()), _SCOPE)
                    if count is not None and meter.count >= count:
                        reason = "count"
                    elif end is not None and time.monotonic() >= end:
                        reason = "duration"
            except KeyboardInterrupt:
                reason = "interrupted"
        output.stream({"summary": _summary(meter, choice()) | {"ended": reason}})
        output.facts(f"process {pid}", _rows(meter, watch, choice()), _SCOPE)
        if reason == "the process has ended":
            output.say(f"process {pid} has ended or executed another program")


def _until(end: float, interval: float) -> float:
    return max(0.0, min(interval, end - time.monotonic()))


def _fields(sample: Sample, watch: Watch) -> dict[str, object]:
    return {
        "seconds": round(sample.seconds, 6),
        "dirty_bytes": sample.dirty_bytes,
        "tracked_bytes": sample.tracked_bytes,
        "untracked_bytes": sample.untracked_bytes,
        "bytes_per_second": round(sample.rate),
        "processes": watch.processes,
        "backend": watch.backend,
    }


def _summary(meter: Meter, choice: tuple[float, float] | None) -> dict[str, object]:
    found: dict[str, object] = {
        "seconds": round(meter.seconds, 6),
        "looks": meter.count,
        "mean_bytes_per_second": round(meter.mean_rate),
        "peak_bytes_per_second": round(meter.peak_rate),
        "tracked_bytes": meter.last.tracked_bytes,
        "untracked_bytes": meter.last.untracked_bytes,
    }
    if choice is not None:
        interval, cost = choice
        found["checkpoint_interval_s"] = round(interval, 3)
        found["checkpoint_cost_s"] = round(cost, 6)
        found["checkpoint_bytes"] = round(
            incremental_bytes(meter.mean_rate, meter.last.tracked_bytes, interval)
        )
    return found


def _rows(
    meter: Meter, watch: Watch, choice: tuple[float, float] | None
) -> list[tuple[str, object]]:
    last = meter.last
    rows: list[tuple[str, object]] = [
        ("Processes, backend", f"{watch.processes}, {watch.backend}"),
        (
            "Writes per s: now, mean, peak",
            f"{mib(last.rate)}, {mib(meter.mean_rate)}, {mib(meter.peak_rate)}",
        ),
        (
            "Memory",
            f"{mib(last.tracked_bytes)}, {100 * last.share:.1f} % written in the last look",
        ),
        ("Not tracked", mib(last.untracked_bytes)),
    ]
    for seconds in (60.0, 600.0):
        size = incremental_bytes(meter.mean_rate, last.tracked_bytes, seconds)
        rows.append((f"Changed after {seconds:.0f} s", f"at most {mib(size)}"))
    if choice is not None:
        interval, cost = choice
        size = incremental_bytes(meter.mean_rate, last.tracked_bytes, interval)
        rows.append(
            (
                "Checkpoint",
                f"every {interval:.0f} s, for {cost:.2f} s, at most {mib(size)} changed"
                if interval
                else "no writes seen: as often or as seldom as you like",
            )
        )
    return rows
