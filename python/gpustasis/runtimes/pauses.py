# SPDX-License-Identifier: Apache-2.0
"""Which paused containers their runtime has left so: it was killed in the middle of a checkpoint,
for which it had paused them, and its successor knows nothing of that.

A pause belongs to the runtime that ran when it began. Once that runtime has ended nobody will end
the pause, so it is ended here. Left alone is a container that was paused before the first look,
for then nobody knows by whom; and one that has stood still for long while no checkpoint of it was
under way: somebody wants that. After a checkpoint that takes longer to be believed, for its runtime
may still pack the archive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BY_HAND_S = 60.0  # a checkpoint's dump begins well before, and is seen to
AFTER_DUMP_S = 600.0  # of a checkpoint whose archive is written, with no file of it open just then
SAY_S = 10.0  # a checkpoint under way at the first look is likely to have gone on by then
SETTLE_S = 0.5  # there are moments between two files of a dump
IN_FLIGHT_S = 3.0  # a pause that a runtime has asked for may begin after the runtime's end
RETAIN_S = 2.0  # a dump that was about to begin at a resume pauses the container again at its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What is seen at one moment, by the ids of containers. frozen: those that stand still.
    dumping: those that a criu dumps, and when the first such criu was started, in clock ticks from
    boot. busy: those of which the runtime has a file open; it may be packing the archive.

    Who looks must look for dumps first: criu thaws a container for its dump and freezes it again
    before it ends. The other way round, one could be seen neither frozen nor dumped.
    """

    frozen: set[str]
    dumping: Mapping[str, int]
    busy: set[str]


class Pauses:
    """What was seen of containers' pauses.

    now: monotonic seconds. runtime_start: when the runtime of now was started, in clock ticks from
    boot; None while none is there.
    """

    def __init__(self) -> None:
        self._first = True
        self._unsaid: set[str] = set()  # paused at the first look
        self._at_rest: dict[str, float] = {}  # frozen without a dump, since when
        self._dumped: set[str] = set()  # by the runtime of now, since they were last seen to run
        self._wanted: set[str] = set()  # by somebody, as far as is known
        self._stood_long: set[str] = set()  # of these, and not said yet
        self._left: dict[str, float | None] = {}  # by their runtime; since when without a dump
        self._resumed: set[str] = set()  # of these, and not dumped since
        self._ended_at: float | None = None  # when the last runtime was

    def is_restless(self, now: float) -> bool:
        """Whether there may be something to resume soon."""
        return bool(self._left) or self.is_in_flight(now)

    def note(self, look: Look, runtime_start: int, now: float) -> set[str]:
        """A look while a runtime runs. What is returned was paused at the first look and still is:
        nobody knows why."""
        own = {one for one, start in look.dumping.items() if start >= runtime_start}
        if self._first:
            self._first = False
            self._unsaid = look.frozen - look.dumping.keys()
            self._wanted |= self._unsaid
        # A dump that is older than the runtime of now is its predecessor's.
        self.leave(look.dumping.keys() - own - self._wanted - self._left.keys())
        for one in self._known() - look.frozen - look.dumping.keys():
            self._forget(one)
        for one in look.dumping.keys() | look.busy:
            self._at_rest.pop(one, None)  # what lasts from its end on may be by hand
        for one in look.frozen - look.dumping.keys() - look.busy - self._left.keys():
            since = self._at_rest.setdefault(one, now)
            limit = AFTER_DUMP_S if one in self._dumped else BY_HAND_S
            if now - since >= limit and one not in self._wanted:
                self._wanted.add(one)
                self._stood_long.add(one)
        self._dumped |= own
        self._wanted -= self._unsaid & own  # it was paused for this checkpoint
        self._unsaid -= own
        old = {one for one in self._unsaid if now - self._at_rest.get(one, now) >= SAY_S}
        self._unsaid -= old
        return old

    def stood_long(self) -> set[str]:
        """Those that have stood still for long while no checkpoint of them was under way, since the
        last call: somebody has paused them, or a checkpoint has left them so."""
        found, self._stood_long = self._stood_long, set()
        return found

    def runtime_ended(self, look: Look, now: float, *, in_flight: bool = True) -> set[str]:
        """A look just after the runtime has ended. What is returned stays paused: somebody else
        than the runtime wants it so. in_flight: no other runtime is there yet, so a pause that
        begins soon is one that this one has asked for."""
        self._ended_at = now if in_flight else None
        self.leave((look.frozen | look.dumping.keys()) - self._wanted)
        return look.frozen & self._wanted

    def note_late(self, look: Look, now: float) -> None:
        """A look that began when no runtime had been found yet. A pause that the last one had asked
        for may begin only now."""
        if self.is_in_flight(now):
            late = look.frozen | look.dumping.keys()
            self.leave(late - self._wanted - self._left.keys())

    def due(self, look: Look, runtime_start: int | None, now: float) -> set[str]:
        """Those to resume now."""
        own = {
            one
            for one, start in look.dumping.items()
            if runtime_start is not None and start >= runtime_start
        }
        for one in own & self._left.keys():  # it runs: the runtime of now is at its checkpoint
            self._forget_left(one)
        if runtime_start is None:
            self.note_late(look, now)
        else:
            self._ended_at = None  # from now on a pause may be of the runtime of now
        found = set()
        for one, clear_since in list(self._left.items()):
            if one in look.dumping or one in look.busy:
                self._left[one] = None
                self._resumed -= look.dumping.keys()
                continue
            clear_s = 0.0 if clear_since is None else now - clear_since
            self._left[one] = now - clear_s
            if one in look.frozen:
                if one in self._resumed and runtime_start is not None:
                    self._forget_left(one)  # for a checkpoint by the runtime of now
                elif clear_s >= SETTLE_S:
                    found.add(one)
            elif clear_s >= RETAIN_S:
                self._forget_left(one)
        return found

    def tried(self, container: str, now: float, *, resumed: bool) -> None:
        """It was resumed, or that has failed: look at it again, after a while."""
        if container in self._left:
            self._left[container] = now
            if resumed:
                self._resumed.add(container)

    def is_in_flight(self, now: float) -> bool:
        """Whether a pause that begins now may be one that the last runtime has asked for."""
        return self._ended_at is not None and now - self._ended_at < IN_FLIGHT_S

    def leave(self, containers: set[str]) -> None:
        """Their runtime has ended, and has left them paused, or in a dump."""
        for one in containers:
            self._forget(one)
            self._left[one] = None
            self._resumed.discard(one)

    def _forget_left(self, container: str) -> None:
        del self._left[container]
        self._resumed.discard(container)

    def _known(self) -> set[str]:
        return {*self._at_rest, *self._dumped, *self._wanted}

    def _forget(self, container: str) -> None:
        self._at_rest.pop(container, None)
        self._dumped.discard(container)
        self._wanted.discard(container)
        self._stood_long.discard(container)
        self._unsaid.discard(container)
