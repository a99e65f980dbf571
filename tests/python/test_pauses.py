# SPDX-License-Identifier: Apache-2.0
"""Which paused containers are resumed: those that their runtime has left so, and no others."""

from __future__ import annotations

import pytest

from gpustasis.runtimes.pauses import (
    AFTER_DUMP_S,
    BY_HAND_S,
    IN_FLIGHT_S,
    RETAIN_S,
    SAY_S,
    SETTLE_S,
    Look,
    Pauses,
)

FIRST, SECOND = 1000, 2000  # when the two runtimes were started, in clock ticks from boot
TICK_S = 0.25


class Node:
    """One container, `c`, of a runtime; looked at four times a second."""

    def __init__(self, *, first_look: str = "running") -> None:
        self.pauses = Pauses()
        self.now = 100.0
        self.runtime: int | None = FIRST
        self.said: set[str] = set()
        self.long: list[str] = []
        self.tried = self.resumed = 0
        self.works = True
        self.state = first_look

    def look(self) -> Look:
        """state: running, paused, packed (paused while its archive is written), or "dump N" by a
        criu that was started at N."""
        dumps = {"c": int(self.state.split()[1])} if self.state.startswith("dump") else {}
        frozen = {"c"} if self.state in {"paused", "packed"} else set()
        busy = {"c"} if self.state == "packed" else set()
        return Look(frozen=frozen, dumping=dumps, busy=busy)

    def stay(self, seconds: float, state: str | None = None) -> Node:
        self.state = state or self.state
        for _ in range(max(1, round(seconds / TICK_S))):
            if self.runtime is not None:
                self.said |= self.pauses.note(self.look(), self.runtime, self.now)
                self.long += self.pauses.stood_long()
            if self.pauses.due(self.look(), self.runtime, self.now):
                self.tried += 1
                if self.works:
                    self.resumed += 1
                    self.state = "running"
                self.pauses.tried("c", self.now, resumed=self.works)
            self.now += TICK_S
        return self

    def kill(self, *, back_after_s: float = 0.0) -> Node:
        self.kept = self.pauses.runtime_ended(self.look(), self.now)
        self.runtime = None
        if back_after_s:
            self.stay(back_after_s)
        self.runtime = SECOND
        return self


@pytest.mark.parametrize("back_after_s", [0.0, 2.0, 20.0])
@pytest.mark.parametrize("seen_s", [TICK_S, 5.0])
def test_a_runtime_is_killed_while_criu_dumps(seen_s: float, back_after_s: float) -> None:
    node = Node().stay(5).stay(TICK_S, "paused").stay(seen_s, "dump 1500")
    node.kill(back_after_s=back_after_s).stay(3)
    assert node.resumed == 0
    node.stay(SETTLE_S, "paused").stay(3 * SETTLE_S)
    assert (node.resumed, node.state) == (1, "running")


def test_a_dump_that_was_seen_by_nobody() -> None:
    """All of it between two looks: the container is paused when its runtime's end is found."""
    node = Node().stay(5)
    node.state = "paused"
    node.kill().stay(2)
    assert (node.resumed, node.state) == (1, "running")


def test_a_pause_that_begins_just_after_the_end() -> None:
    node = Node().stay(5).kill(back_after_s=1)
    node.runtime = None
    node.stay(2, "paused")
    assert node.resumed == 1


def test_a_pause_long_after_the_end_is_somebody_s() -> None:
    node = Node().stay(5).kill(back_after_s=IN_FLIGHT_S + 1)
    node.runtime = None
    assert node.stay(5, "paused").resumed == 0
    node.runtime = SECOND
    assert node.stay(5).resumed == 0


def test_a_pause_by_the_next_runtime_is_its_own() -> None:
    node = Node().stay(5).kill(back_after_s=TICK_S).stay(TICK_S)
    assert node.stay(IN_FLIGHT_S, "paused").stay(1, "running").resumed == 0
    assert node.stay(TICK_S, "paused").stay(3, "dump 2100").stay(30, "packed").resumed == 0
    assert node.stay(30, "paused").resumed == 0


def test_a_pause_at_the_first_look_at_the_next_runtime_is_its_own() -> None:
    node = Node().stay(5).kill()
    assert node.stay(2 * IN_FLIGHT_S, "paused").resumed == 0


def test_a_pause_before_the_next_runtime_was_found() -> None:
    node = Node().stay(5).kill()
    node.state = "paused"
    node.pauses.note_late(node.look(), node.now)
    assert node.stay(2).resumed == 1


def test_the_next_runtime_checkpoints_at_once() -> None:
    """A dump that began after it was started is its own, though the first look at it is just after
    the end of the one before."""
    node = Node().stay(5).kill().stay(TICK_S, "paused")
    node.stay(1, "dump 2001").stay(1, "paused").stay(10, "packed").stay(10, "paused")
    assert node.resumed == 0
    short = Node().stay(5).kill().stay(TICK_S, "dump 2001")
    assert short.stay(10, "paused").resumed == 0


def test_there_are_moments_between_two_files() -> None:
    """In which nothing shows that the dump, or the packing, goes on."""
    node = Node().stay(5).stay(1, "dump 1500").kill()
    for state in ("dump 1500", "packed"):
        node.stay(5, state).stay(TICK_S, "paused")
    assert node.stay(5, "packed").resumed == 0
    assert node.stay(1, "paused").resumed == 1


def test_what_cannot_be_resumed_is_tried_again() -> None:
    node = Node().stay(5).stay(1, "dump 1500").kill()
    node.works = False
    node.stay(BY_HAND_S + 10, "paused")
    assert BY_HAND_S <= node.tried <= (BY_HAND_S + 10) / SETTLE_S
    assert node.kill().kept == set()
    node.works = True
    node.stay(1).stay(RETAIN_S / 2, "running").stay(5, "dump 1500").stay(2, "paused")
    assert node.resumed == 2


def test_a_checkpoint_is_let_finish() -> None:
    node = Node().stay(5).stay(1, "paused").stay(600, "dump 1500").stay(600, "packed")
    assert node.stay(600, "paused").stay(5, "running").resumed == 0


def test_a_runtime_is_killed_after_a_long_time_of_packing() -> None:
    """It stood still for long, but for a checkpoint, whose dump was seen."""
    node = Node().stay(5).stay(5, "dump 1500").stay(2 * BY_HAND_S, "packed").kill()
    node.stay(2, "paused")
    assert (node.kept, node.resumed) == (set(), 1)


def test_what_somebody_paused_stays_paused_whatever_the_runtime_does() -> None:
    node = Node().stay(5).stay(BY_HAND_S + 1, "paused").kill(back_after_s=5)
    assert (node.kept, node.stay(60).resumed) == ({"c"}, 0)


def test_it_is_not_held_against_it_for_ever() -> None:
    """Once it was seen to run, a pause is a new one."""
    node = Node().stay(5).stay(BY_HAND_S + 1, "paused").stay(5, "running")
    node.stay(5, "dump 1500").kill().stay(2, "paused")
    assert node.resumed == 1


def test_a_runtime_that_is_started_again_without_a_checkpoint() -> None:
    node = Node().stay(5).kill(back_after_s=2).stay(60)
    assert (node.resumed, node.said, node.kept) == (0, set(), set())


def test_what_was_paused_at_the_first_look_is_said_and_left() -> None:
    node = Node(first_look="paused").stay(SAY_S - 1)
    assert node.said == set()
    assert node.stay(2).said == {"c"}
    node.said.clear()
    assert node.stay(BY_HAND_S / 2).said == set()
    assert (node.kill(back_after_s=2).kept, node.stay(60).resumed) == ({"c"}, 0)


def test_a_checkpoint_that_was_under_way_at_the_first_look_is_known() -> None:
    """Its criu is younger than the runtime: that runtime has paused it."""
    node = Node(first_look="paused").stay(1).stay(3, "dump 1500").stay(SAY_S + 1, "packed")
    assert (node.said, node.resumed) == (set(), 0)
    assert node.kill().stay(3, "paused").resumed == 1


def test_a_dump_at_the_first_look_that_is_older_than_the_runtime() -> None:
    node = Node(first_look="dump 900").stay(5).stay(3, "paused")
    assert (node.resumed, node.said) == (1, set())


def test_a_dump_that_was_about_to_begin_pauses_it_again_at_its_end() -> None:
    node = Node().stay(5).stay(TICK_S, "paused").kill().stay(1)
    assert node.resumed == 1
    node.stay(TICK_S, "running").stay(5, "dump 1500").stay(2, "paused")
    assert (node.resumed, node.state) == (2, "running")


def test_a_resumed_container_is_soon_like_any_other() -> None:
    node = Node().stay(5).stay(TICK_S, "paused").kill().stay(1 + 2 * RETAIN_S)
    assert not node.pauses.is_restless(node.now)
    assert node.stay(30, "paused").resumed == 1


def test_two_runtimes_end_before_the_dump_does() -> None:
    node = Node().stay(5).stay(3, "dump 1500").kill(back_after_s=1).stay(1).kill().stay(1)
    assert node.stay(2, "paused").resumed == 1


def test_a_dump_at_a_later_look_that_is_older_than_the_runtime() -> None:
    """Of a container that the last runtime had started since its last list."""
    node = Node().stay(2).kill()
    node.runtime = SECOND
    node.stay(IN_FLIGHT_S + 1, "running").stay(3, "dump 1990").stay(SETTLE_S + 1, "paused")
    assert (node.state, node.resumed) == ("running", 1)


@pytest.mark.parametrize("back_after_s", [0.0, 5.0])
def test_somebody_pauses_it_just_after_a_checkpoint(back_after_s: float) -> None:
    """Too soon to be seen to run. What its runtime still has to write does not count."""
    node = Node().stay(5).stay(5, "dump 1500").stay(2 * AFTER_DUMP_S, "packed")
    node.stay(AFTER_DUMP_S + 1, "paused").kill(back_after_s=back_after_s)
    assert node.kept == {"c"}
    assert node.stay(30).resumed == 0
    node = Node().stay(5).stay(5, "dump 1500").stay(AFTER_DUMP_S / 2, "paused").kill()
    assert node.stay(30).resumed == 1


def test_what_stands_still_for_long_is_said_once() -> None:
    """By hand, or after a checkpoint that has left it so. What was paused at the first look is said
    in another way."""
    node = Node().stay(5).stay(BY_HAND_S - 1, "paused")
    assert node.long == []
    assert node.stay(2).long == ["c"]
    assert node.stay(2 * BY_HAND_S).long == ["c"]
    node.stay(1, "running").stay(1, "dump 1500")
    assert node.stay(AFTER_DUMP_S - 1, "paused").long == ["c"]
    assert node.stay(2).long == ["c", "c"] and node.resumed == 0
    assert Node(first_look="paused").stay(2 * BY_HAND_S).long == []
