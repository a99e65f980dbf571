# SPDX-License-Identifier: Apache-2.0
"""A plan: what each way of taking checkpoints costs a job, and its best interval."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gpustasis.planning.figures import Figures
from gpustasis.planning.interval import Costs, Shares, best, daly, shares, young

MONTH_H = 365.25 * 24 / 12
_DAY_S = 86400.0
_HOUR_S = 3600.0

WAYS = {
    "none": "no checkpoints",
    "user": "in user code",
    "disk": "gpustasis, to disk",
    "peer": "what if: to memory, a copy on a peer",
}
_AT_PEER = "gpustasis, committed at the peer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What comes of one interval. interval_s: of work between checkpoints; without checkpoints, all
    work. ettr: effective training time ratio. Hours, money and checkpoints are of one month."""

    interval_s: float
    shares: Shares
    ettr: float
    lost_gpu_hours: float
    lost_money: float
    checkpoints: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of taking checkpoints. Of "none", best has all work as its interval.

    young_s, daly_s: the intervals of these estimates; None where a checkpoint costs nothing.
    chosen: of the interval that was asked for.
    """

    name: str
    title: str
    costs: Costs
    stored_gb: float
    stored_money: float
    young_s: float | None
    daly_s: float | None
    best: Outcome
    chosen: Outcome | None
    notes: tuple[str, ...] = ()

    @property
    def takes_checkpoints(self) -> bool:
        return self.name != "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """mtbf_s: of the whole job. failures: in a month."""

    gpus: int
    nodes: int
    mtbf_s: float
    failures: float
    least_interval_s: float
    ways: tuple[Way, ...]


def make_plan(figures: Figures, *, commit_at_peer: bool = False) -> Plan:
    """The plan of these figures. commit_at_peer: a copy on a peer is made before the job goes on,
    as by `gpustasis job run --commit-at peer`. Raises ValueError if a figure is missing, or they
    contradict."""
    mtbf_s = job_mtbf_s(figures)
    ways = [_without(figures, mtbf_s)]
    ways += [
        _with(figures, mtbf_s, name, _costs(figures, name))
        for name in ("user", "disk")
        if figures.is_given(name)
    ]
    if figures.is_given("peer"):
        costs = _peer_costs(figures, waits=commit_at_peer)
        title = _AT_PEER if commit_at_peer else WAYS["peer"]
        ways.append(replace(_with(figures, mtbf_s, "peer", costs), title=title))
    elif commit_at_peer:
        raise ValueError(
            "peer.memory_gb_per_s is not given: what is committed at the peer is copied"
        )
    if len(ways) == 1:
        raise ValueError(
            "no way of taking checkpoints is given; of gpustasis, disk.downtime_s and "
            "disk.restore_s are needed"
        )
    return Plan(
        gpus=int(figures["gpus"]),
        nodes=nodes_of(figures),
        mtbf_s=mtbf_s,
        failures=MONTH_H * _HOUR_S / mtbf_s,
        least_interval_s=figures["least_interval_s"],
        ways=tuple(ways),
    )


def nodes_of(figures: Figures) -> int:
    """Nodes that the GPUs need."""
    return math.ceil(figures["gpus"] / figures["gpus_per_node"])


def job_mtbf_s(figures: Figures) -> float:
    """Seconds from one failure of the job to the next: any GPU and any node ends all of it. Raises
    ValueError."""
    hours = figures.find("mtbf_h")
    daily = figures["gpus"] * figures["gpu_failures"] + nodes_of(figures) * figures["node_failures"]
    if hours is not None and daily > 0:
        raise ValueError("mtbf_h and rates of failures are given: one of the two is enough")
    if hours is not None:
        return hours * _HOUR_S
    if daily == 0:
        raise ValueError("no failures are given: gpu_failures, node_failures or mtbf_h")
    return 1000 * _DAY_S / daily


def _costs(figures: Figures, name: str) -> Costs:
    """Of checkpoints on storage."""
    return Costs(
        stop_s=figures[f"{name}.drain_s"] + figures[f"{name}.downtime_s"],
        lag_s=figures[f"{name}.write_s"],
        recovery_s=figures["detect_s"] + figures[f"{name}.restore_s"],
        slowdown=figures[f"{name}.slowdown"],
    )


def _peer_costs(figures: Figures, *, waits: bool) -> Costs:
    """Of checkpoints in the memory of each node, and copied to another node's: while the job works,
    or, if it waits, before it goes on. A restore has one node fetch its copy; the others have
    theirs."""
    drain_s = figures.find("peer.drain_s")
    share_gb = _peer_size_gb(figures) / nodes_of(figures)
    copied_s = share_gb / figures["peer.memory_gb_per_s"]
    sent_s = share_gb / figures["peer.network_gb_per_s"]
    stop_s = copied_s + (figures["disk.drain_s"] if drain_s is None else drain_s)
    return Costs(
        stop_s=stop_s + sent_s if waits else stop_s,
        lag_s=0.0 if waits else sent_s,
        recovery_s=figures["detect_s"] + figures["peer.restore_s"] + sent_s + copied_s,
        slowdown=figures["peer.slowdown"],
    )


def _peer_size_gb(figures: Figures) -> float:
    size_gb = figures.find("peer.size_gb")
    size_gb = figures["disk.size_gb"] if size_gb is None else size_gb
    if size_gb == 0:
        raise ValueError("peer.size_gb is not given, nor is disk.size_gb: how much is copied?")
    return size_gb


def _without(figures: Figures, mtbf_s: float) -> Way:
    recovery_s = figures["detect_s"] + figures["start_s"]
    costs = Costs(stop_s=0, lag_s=0, recovery_s=recovery_s)
    whole_s = figures["work_h"] * _HOUR_S
    return Way(
        name="none",
        title=WAYS["none"],
        costs=costs,
        stored_gb=0,
        stored_money=0,
        young_s=None,
        daly_s=None,
        best=_outcome(figures, mtbf_s, costs, whole_s, checkpoints=False),
        chosen=None,
    )


def _with(figures: Figures, mtbf_s: float, name: str, costs: Costs) -> Way:
    interval_s = best(costs, mtbf_s, figures["least_interval_s"])
    asked_s = figures.find("interval_s")
    stored_gb = 0.0 if name == "peer" else figures["keep"] * figures[f"{name}.size_gb"]
    notes = []
    if interval_s == costs.lag_s - costs.stop_s:
        notes.append("the interval is as short as writing allows")
    elif interval_s == figures["least_interval_s"]:
        notes.append("the interval is the least that is allowed")
    if asked_s is not None and asked_s + costs.stop_s < costs.lag_s:
        notes.append(f"an interval of {asked_s:g} s is too short: writing takes {costs.lag_s:g} s")
        asked_s = None
    return Way(
        name=name,
        title=WAYS[name],
        costs=costs,
        stored_gb=stored_gb,
        stored_money=stored_gb * figures["price_gb_month"],
        young_s=young(costs.stop_s, mtbf_s) if costs.stop_s > 0 else None,
        daly_s=daly(costs.stop_s, mtbf_s) if costs.stop_s > 0 else None,
        best=_outcome(figures, mtbf_s, costs, interval_s),
        chosen=None if asked_s is None else _outcome(figures, mtbf_s, costs, asked_s),
        notes=tuple(notes),
    )


def _outcome(
    figures: Figures, mtbf_s: float, costs: Costs, interval_s: float, *, checkpoints: bool = True
) -> Outcome:
    found = shares(costs, mtbf_s, interval_s)
    hours = MONTH_H * figures["gpus"]
    counted = (found.work + found.slowdown) / interval_s * MONTH_H * _HOUR_S
    return Outcome(
        interval_s=interval_s,
        shares=found,
        ettr=found.work,
        lost_gpu_hours=(1 - found.work) * hours,
        lost_money=(1 - found.work) * hours * figures["price_gpu_hour"],
        checkpoints=counted if checkpoints else 0.0,
    )
