# SPDX-License-Identifier: Apache-2.0
"""Every state that the ranks of a job can get into: the protocol's own code, with store, tasks and
faults played by job_member.py.

Messages are delivered, and writes are stored, in every order. Faults cost of a budget; what repairs
costs nothing, and neither does a deadline when nothing else can happen. Ranks that are not the lead
are alike. Once the epoch is decided no rank's step changes anything for another one: from there on
each is explored alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from gpustasis.jobs import lead
from gpustasis.jobs.messages import Epoch, Phase
from support import job_member
from support.job_member import Member, pruned

Node = TypeVar("Node")


class Found(Exception):
    """A state that must not be. trace: how it was reached."""

    def __init__(self, problem: str, trace: list[str]) -> None:
        super().__init__("\n".join([problem, *trace]))
        self.problem = problem


# The epoch's revision, whether it is aborted, numbers of members; those behind the lead's sorted.
State = tuple[int, bool, tuple[int, ...]]


class Move(NamedTuple):
    """A Change, with numbers."""

    cost: int
    label: str
    number: int
    revision: int
    aborted: bool
    lead_looks: bool
    starts: bool


class Edge(NamedTuple):
    cost: int
    label: tuple[int, str]  # whose, what
    state: State


class Model:
    """All states from the beginning on, with at most `faults` faults."""

    def __init__(self, world: int, faults: int, *, leave_running: bool = False) -> None:
        self.faults = faults
        self.world = world
        self.leave_running = leave_running
        self._members: list[Member] = []
        self._numbers: dict[Member, int] = {}
        self._moves: dict[tuple[int, bool, int, bool, bool], list[Move]] = {}
        self._prunes: dict[tuple[int, int], int] = {}
        self._problems: dict[tuple[int, int, bool], str] = {}
        self._led: dict[tuple[object, ...], int] = {}
        self._decided: dict[tuple[bool, bool], set[int]] = {}
        self.decided = 0
        first = (1, False, (self._number(Member()),) * world)
        self.costs: dict[State, int] = {first: 0}
        self.free: dict[State, list[State]] = {}
        self._came_from: dict[State, tuple[State, tuple[int, str]]] = {}
        self._layers: list[deque[State]] = [deque() for _ in range(faults + 1)]
        self._layers[0].append(first)

    def explore(self) -> int:
        """How many states there are. Raises Found."""
        for spent, layer in enumerate(self._layers):
            while layer:
                state = layer.popleft()
                if self.costs[state] == spent and state not in self.free:
                    self._expand(state, spent)
        self._check_that_all_are_decided()
        for (aborted, is_lead), members in self._decided.items():
            self._explore_decided(aborted, is_lead, members)
        return len(self.free) + self.decided

    def _number(self, member: Member) -> int:
        number = self._numbers.setdefault(member, len(self._members))
        if number == len(self._members):
            self._members.append(member)
        return number

    def _epoch(self, revision: int, aborted: bool) -> Epoch:
        phase = Phase.ABORTED if aborted else job_member.PHASES[revision - 1]
        return Epoch(phase, revision, self.leave_running)

    def _expand(self, state: State, spent: int) -> None:
        revision, aborted, numbers = state
        epoch = self._epoch(revision, aborted)
        for rank, number in enumerate(numbers):
            if problem := self._problem(number, epoch):
                raise Found(problem, self._trace(state))
            if epoch.phase.is_final:
                self._decided.setdefault((aborted, rank == lead.LEAD), set()).add(number)
        self.free[state] = []
        if epoch.phase.is_final:
            return
        edges = list(self._edges(state))
        if not any(edge.cost == 0 for edge in edges):  # then time passes
            edges = [e._replace(cost=0) if e.label[1] == "is late" else e for e in edges]
            gone = all(self._members[number].tasks == "gone" for number in numbers)
            if not any(edge.cost == 0 for edge in edges) and not gone:
                raise Found(f"for ever in phase {epoch.phase}", self._trace(state))
        for edge in edges:
            self._reached(edge, state, spent)

    def _reached(self, edge: Edge, state: State, spent: int) -> None:
        if edge.cost == 0:
            self.free[state].append(edge.state)
        cost = spent + edge.cost
        if cost <= self.faults and self.costs.get(edge.state, self.faults + 1) > cost:
            self.costs[edge.state] = cost
            self._came_from[edge.state] = (state, edge.label)
            self._layers[cost].append(edge.state)

    def _edges(self, state: State) -> Iterator[Edge]:
        revision, aborted, numbers = state
        first = self._members[numbers[lead.LEAD]]
        lead_is_gone = first.joined and first.step is None
        for rank, number in enumerate(numbers):
            for move in self._changes(revision, aborted, number, rank == lead.LEAD, lead_is_gone):
                after = list(numbers)
                if move.revision != revision:
                    self._check_order(state, move)
                    after = [self._pruned(other, move.revision) for other in numbers]
                after[rank] = move.number
                if move.lead_looks:
                    after = self._all_viewed(after) if move.starts else after
                    after[0] = self._asked(move.revision, move.aborted, tuple(after))
                yield Edge(
                    move.cost,
                    (rank, move.label),
                    (move.revision, move.aborted, (after[0], *sorted(after[1:]))),
                )
        if first.me is not None and first.connected:
            yield from self._views(state)

    def _views(self, state: State) -> Iterator[Edge]:
        """The lead reads what the store has of a rank."""
        revision, aborted, numbers = state
        for rank, number in enumerate(numbers):
            member = self._members[number]
            if member.view != member.stored:
                after = list(numbers)
                after[rank] = self._number(member._replace(view=member.stored))
                after[0] = self._asked(revision, aborted, tuple(after))
                order = (after[0], *sorted(after[1:]))
                yield Edge(0, (rank, "is read by the lead"), (revision, aborted, order))

    def _all_viewed(self, numbers: list[int]) -> list[int]:
        members = (self._members[number] for number in numbers)
        return [self._number(member._replace(view=member.stored)) for member in members]

    def _changes(
        self, revision: int, aborted: bool, number: int, is_lead: bool, lead_is_gone: bool
    ) -> list[Move]:
        key = (revision, aborted, number, is_lead, lead_is_gone)
        if key not in self._moves:
            epoch = self._epoch(revision, aborted)
            self._moves[key] = [
                Move(
                    change.cost,
                    change.label,
                    self._number(change.member),
                    change.epoch.revision,
                    change.epoch.phase is Phase.ABORTED,
                    change.lead_looks,
                    change.starts,
                )
                for change in job_member.changes(
                    self._members[number], epoch, is_lead, lead_is_gone
                )
            ]
        return self._moves[key]

    def _pruned(self, number: int, revision: int) -> int:
        key = number, revision
        if key not in self._prunes:
            self._prunes[key] = self._number(pruned(self._members[number], revision))
        return self._prunes[key]

    def _problem(self, number: int, epoch: Epoch) -> str:
        key = number, epoch.revision, epoch.phase is Phase.ABORTED
        if key not in self._problems:
            self._problems[key] = job_member.problem(self._members[number], epoch)
        return self._problems[key]

    def _asked(self, revision: int, aborted: bool, numbers: tuple[int, ...]) -> int:
        """The lead, once it has asked for what follows from what it has read."""
        views = tuple(self._members[number].view for number in numbers)
        key = (revision, aborted, numbers[0], views)
        if key not in self._led:
            epoch = self._epoch(revision, aborted)
            first = job_member.asked(self._members[numbers[0]], epoch, views)
            self._led[key] = self._number(first)
        return self._led[key]

    def _check_order(self, state: State, move: Move) -> None:
        """The network is locked when all CUDA is, and the GPUs let go when all networks are."""
        phase = self._epoch(move.revision, move.aborted).phase
        wanted = {Phase.LOCK_NETWORK: "cuda", Phase.DUMP: "net"}.get(phase)
        members = [self._members[number] for number in state[2]]
        if wanted and any(m.tasks != wanted and not m.is_disturbed for m in members):
            raise Found(f"{phase} before all are {wanted}", self._trace(state))

    def _check_that_all_are_decided(self) -> None:
        """Without another fault, every epoch comes to its decision."""
        before: dict[State, list[State]] = {}
        for state, followers in self.free.items():
            for follower in followers:
                before.setdefault(follower, []).append(state)
        good = reached([state for state, followers in self.free.items() if not followers], before)
        for state in self.free:
            if state not in good:
                raise Found("no decision is reached from here", self._trace(state))

    def _explore_decided(self, aborted: bool, is_lead: bool, members: set[int]) -> None:
        """Ranks once the epoch is decided: with any number of faults, each comes to the right
        end."""
        revision = len(job_member.PHASES)  # later than anything that was read before
        epoch = self._epoch(revision, aborted)
        before: dict[int, list[int]] = {}
        ends, seen = [], set[int]()
        left = [self._pruned(number, revision) for number in members]
        while left:
            number = left.pop()
            if number in seen:
                continue
            seen.add(number)
            if problem := self._problem(number, epoch):
                raise Found(f"once decided: {problem}", [repr(self._members[number])])
            moves = [
                move
                for gone in {False, not is_lead}
                for move in self._changes(revision, aborted, number, is_lead, gone)
            ]
            if any(move.revision != revision for move in moves):
                raise Found("a decision was changed", [repr(self._members[number])])
            free = {move.number for move in moves if move.cost == 0} - {number}
            for other in free:
                before.setdefault(other, []).append(number)
            if not free:
                ends.append(number)
                if problem := job_member.bad_end(self._members[number], epoch):
                    raise Found(f"once decided: {problem}", [repr(self._members[number])])
            left += [move.number for move in moves]
        good = reached(ends, before)
        for number in seen - good:
            raise Found("once decided: no end is reached", [repr(self._members[number])])
        self.decided += len(seen)

    def _trace(self, state: State) -> list[str]:
        labels = []
        while state in self._came_from:
            state, (rank, label) = self._came_from[state]
            labels.append(f"{rank} {label}")
        return labels[::-1]


def reached(ends: list[Node], before: dict[Node, list[Node]]) -> set[Node]:
    """Everything from which one of the ends is reached."""
    good = set(ends)
    while ends:
        for node in before.get(ends.pop(), ()):
            if node not in good:
                good.add(node)
                ends.append(node)
    return good
