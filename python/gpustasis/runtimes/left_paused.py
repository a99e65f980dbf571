# SPDX-License-Identifier: Apache-2.0
"""A watch over a node's container runtime: what it leaves paused when it is killed in the middle of
a checkpoint is resumed.

containerd takes a container that is paused when containerd starts for one in an unknown state, and
its kubelet then kills it. So a container is resumed through its shim, before containerd is back if
that can be.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpustasis.errors import CheckpointError, EngineError
from gpustasis.runtimes import crio, shim
from gpustasis.runtimes.cri import Cri, socket_path
from gpustasis.runtimes.cri_containers import (
    CRIO,
    CRIU,
    PERHAPS_PAUSED,
    Container,
    alone,
    containers,
    files_at_work,
    resume_task,
)
from gpustasis.runtimes.crio import CRIO_NAME, storage_directory
from gpustasis.runtimes.freezer import groups_by_container, is_frozen, thaw
from gpustasis.runtimes.instance import Instance, find_instance, require_sight, wait
from gpustasis.runtimes.pauses import Look, Pauses
from gpustasis.runtimes.shim import find_shim
from gpustasis.task import open_files, read_task

POLL_S = 1.0
HURRY_S = 0.25  # while there is something to resume
_LATE_S = 3.0  # from the last look at a runtime to the notice of its end
_ASK_S = 2.0  # for a question to CRI-O beside its API
_RESUME_S = 10.0  # for a call that resumes one container: others wait for it
_SEARCH_S = 10.0  # between two searches for a container's groups that are not to be found
_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_CONTAINERD = "containerd"
_UNKNOWN = "unknown"  # the state of a container that containerd found paused when it started


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something to say. what: "waiting", "watching", "ended", "resumed", "kept" (paused, and left
    so), "unknown" (resumed too late: its kubelet will replace it), "failed"."""

    what: str
    text: str
    container: Container | None = None


def owners(paths: Iterable[str], known: Collection[str]) -> set[str]:
    """Containers of these in whose directories the files are. What has the id of another one for a
    name, below the directory of the first, is that one's own file, and may be called as it likes.
    """
    ids = (next((one for one in _ID.findall(path) if one in known), None) for path in paths)
    return {one for one in ids if one is not None}


class Watch:
    """Resume what the runtime at `address` leaves paused. command: ours that resumes one container,
    for messages. say: is told all that happens."""

    def __init__(self, address: str, command: str, say: Callable[[Event], None]) -> None:
        self._path = socket_path(address)
        self._command = command
        self._tell = say
        self._said: dict[str, str] = {}  # by the container's id, or ""
        self._pauses = Pauses()
        self._runtime = ""
        self._known: dict[str, Container] = {}
        self._groups: dict[str, list[Path]] = {}
        self._unseen: set[str] = set()  # containers without a group, at the last search
        self._searched = 0.0
        self._last = Look(frozen=set(), dumping={}, busy=set())  # while the runtime ran
        self._looked_at = 0.0
        self._resumed: set[str] = set()  # since when it is to be seen in which state they are
        self._unlisted: set[str] = set()  # paused by a runtime that ended before it listed them
        self._storage: Path | None = None  # CRI-O's

    def run(self, stop: int) -> None:
        """Until the descriptor `stop` is readable.

        Raises EngineError if it cannot be told who serves the socket; UnsupportedError without the
        extra.
        """
        while not wait(0, stop):
            self._note_late()
            found = find_instance(self._path)
            if isinstance(found, str):
                self._say("waiting", f"waiting for a runtime: {found}")
                self._mend(None, None)
                wait(self._interval(), stop)
                continue
            try:
                self._follow(found, stop)
            finally:
                found.close()

    def _follow(self, instance: Instance, stop: int) -> None:
        """For as long as that process runs."""
        while not wait(0, stop):
            try:
                with Cri(self._path) as cri:
                    self._serve(cri, instance, stop)
            except EngineError as exc:
                if self._looked_at:
                    self._note_look(instance)
                self._mend(None, instance)  # a runtime that starts does not answer at once
                if not wait(self._interval(), stop, instance.handle):  # it may be about to end
                    self._say("failed", str(exc))
            if instance.has_ended():
                self._note_end(instance)
                return

    def _serve(self, cri: Cri, instance: Instance, stop: int) -> None:
        """While it answers."""

        def over() -> bool:
            return wait(0, stop, instance.handle)

        require_sight(instance.pid)
        self._runtime = cri.runtime(over)
        if self._runtime.startswith(CRIO_NAME):
            with suppress(EngineError):  # what no list had is known with the next one then
                self._storage = storage_directory(self._path, _ASK_S)
        listed = containers(cri, over)
        self._say("watching", f"watching {self._runtime} (process {instance.pid})")
        while True:
            self._note_containers(listed)
            self._pauses.leave(self._unlisted & self._known.keys())
            self._unlisted.clear()
            if not self._note_look(instance):
                return
            self._mend(cri, instance)
            if wait(self._interval(), stop, instance.handle):
                return
            listed = containers(cri, over)

    def _note_look(self, instance: Instance) -> bool:
        """False: the runtime has ended, and what was seen may be the next one's."""
        look = self._look()
        if instance.has_ended():
            return False
        self._last, self._looked_at = look, time.monotonic()
        for one in sorted(self._pauses.note(look, instance.start_time, self._looked_at)):
            self._say("kept", self._why_kept(self._known[one]), self._known[one])
        for one in sorted(self._pauses.stood_long() & self._known.keys()):
            self._said.pop(one, None)  # it may be another pause than the last one
            self._say("kept", self._why_left(self._known[one]), self._known[one])
        return True

    def _note_late(self) -> None:
        """Before a runtime is looked for: what begins to stand still now, it has not paused."""
        now = time.monotonic()
        if self._pauses.is_in_flight(now):
            self._unlisted |= self._find_unlisted()
            self._pauses.note_late(self._look(), now)

    def _note_end(self, instance: Instance) -> None:
        """What stands still now is its doing if it was seen to stand still before, or if the end is
        seen at once: later, it may be the next one's, if there is one."""
        unlisted = self._find_unlisted()
        look, before = self._look(), self._last
        successor = self._successor_since(self._looked_at)
        if successor is None:
            self._unlisted |= unlisted
        else:
            seen = before.frozen | before.dumping.keys()
            dumping = {one: start for one, start in look.dumping.items() if start < successor}
            look = Look(frozen=look.frozen & seen, dumping=dumping, busy=look.busy)
        now = time.monotonic()
        stay = self._pauses.runtime_ended(look, now, in_flight=successor is None)
        self._said.clear()
        self._say("ended", f"{self._runtime} (process {instance.pid}) has ended")
        for one in sorted(stay):
            text = (
                f"{self._known[one]} was paused before that, and not for a checkpoint, as far as "
                f"was seen: it stays so; {self._command} resume {self._known[one].path} lets it "
                "run on"
            )
            self._say("kept", text, self._known[one])

    def _successor_since(self, looked_at: float) -> int | None:
        """When the next runtime was started, in clock ticks from boot, if something that was seen
        just now may be its doing. looked_at: when the last one was seen to run."""
        if time.monotonic() - looked_at <= _LATE_S:
            return None
        try:
            found = find_instance(self._path)
        except EngineError:
            return 0  # there may be one
        if isinstance(found, str):
            return None
        found.close()
        return found.start_time

    def _interval(self) -> float:
        return HURRY_S if self._pauses.is_restless(time.monotonic()) else POLL_S

    def _note_containers(self, listed: list[Container]) -> None:
        """Which there are, and where their control groups are."""
        self._known = {one.id: one for one in listed if one.state in PERHAPS_PAUSED}
        now = time.monotonic()
        unseen = self._known.keys() - self._groups.keys()
        if unseen and (unseen != self._unseen or now - self._searched >= _SEARCH_S):
            self._unseen, self._searched = unseen, now
            # Only of these: of one that is about to begin, a group below may still be missing.
            groups = groups_by_container()
            self._groups = {one: found for one, found in groups.items() if one in self._known}
            if not self._groups:
                self._say(
                    "failed",
                    "no control group of any container is seen from here: run this in the host's "
                    "pid and cgroup namespaces, with the host's /sys/fs/cgroup",
                )
        self._said = {one: text for one, text in self._said.items() if one in {"", *self._known}}
        for one in self._resumed & self._known.keys():
            if self._known[one].state == _UNKNOWN:
                self._say("unknown", self._why_replaced(self._known[one]), self._known[one])
        self._resumed.clear()

    def _find_unlisted(self) -> set[str]:
        """Containers that the runtime has started since its last list, and that stand still. Those
        whose names are to be found are known from now on; others are when the next runtime lists
        them: these are returned."""
        if not self._looked_at:
            return set()  # nothing was ever listed
        groups = groups_by_container()
        names = (name for each in open_files(CRIU)[CRIU].values() for name in each)
        found = owners(names, groups)
        for one in groups.keys() - found - self._known.keys():
            with suppress(EngineError):  # it has gone, or is said when it is listed
                if any(is_frozen(group) for group in groups[one]):
                    found.add(one)
        unlisted = set()
        for one in found - self._known.keys():
            named = self._names(one)
            if named is None:
                unlisted.add(one)
                continue
            namespace, pod, name = named
            self._known[one] = Container(
                id=one, namespace=namespace, pod=pod, name=name, image="", state="running"
            )
            self._groups[one] = groups[one]
        return unlisted

    def _names(self, one: str) -> tuple[str, str, str] | None:
        """Namespace, pod and name of a container, without its runtime."""
        if self._runtime.startswith(_CONTAINERD):
            return shim.container_names(Path(self._path).parent, one)
        return None if self._storage is None else crio.container_names(self._storage, one)

    def _look(self) -> Look:
        """Dumps first: Look says why."""
        dumping: dict[str, int] = {}
        opened = files_at_work()
        for pid, names in opened[CRIU].items():
            with suppress(CheckpointError):  # it has ended
                start = read_task(pid).start_time
                dumping |= {one: min(start, dumping.get(one, start)) for one in self._named(names)}
        busy = {one for names in opened[CRIO].values() for one in self._named(names)}
        frozen = {one for one in self._known if self._is_frozen(one)}
        return Look(frozen=frozen, dumping=dumping, busy=busy)

    def _named(self, names: list[str]) -> set[str]:
        """Containers in whose directories these files are."""
        return owners(names, self._known)

    def _is_frozen(self, one: str) -> bool:
        try:
            return any(is_frozen(group) for group in self._groups.get(one, ()))
        except EngineError as exc:
            self._say("failed", str(exc), self._known[one])
            return False

    def _mend(self, cri: Cri | None, instance: Instance | None) -> None:
        """Resume what is to be resumed. None: no runtime is there."""
        if not self._pauses.is_restless(time.monotonic()):
            return
        start = None if instance is None else instance.start_time
        begin = time.monotonic()
        for one in sorted(self._pauses.due(self._look(), start, begin)):
            container = self._known[one]
            resumed = False
            try:
                if resumed := self._resume(cri, instance, container):
                    text = f"{container} was left paused by a runtime that has ended, and runs on"
                    self._say("resumed", text, container)
                    self._resumed.add(one)
            except EngineError as exc:
                self._say("failed", f"{container} was not resumed: {exc}", container)
            self._pauses.tried(one, time.monotonic(), resumed=resumed)
            if time.monotonic() - begin > POLL_S:
                return  # much may have happened since the look; the others are due again soon

    def _resume(self, cri: Cri | None, instance: Instance | None, container: Container) -> bool:
        """False: it cannot be done yet. Raises EngineError."""
        with alone(container):
            is_containerd = self._runtime.startswith(_CONTAINERD)
            found = find_shim(Path(self._path).parent, container.id) if is_containerd else None
            if found is not None:
                if found.is_paused():
                    found.resume()
            elif cri is not None:
                resume_task(cri, container, _RESUME_S)
            elif is_containerd or instance is not None or self._is_served():
                return False  # a CRI-O that has found it paused must resume it itself
            groups = self._groups.get(container.id, ())
            for group in groups:
                if is_frozen(group):
                    thaw(group)
            for group in groups:
                if is_frozen(group):
                    raise EngineError(f"{group} is still frozen")
        return True

    def _is_served(self) -> bool:
        """Whether a runtime is there by now. Raises EngineError."""
        found = find_instance(self._path)
        if isinstance(found, str):
            return False
        found.close()
        return True

    def _why_kept(self, container: Container) -> str:
        return (
            f"{container} was paused before this watch began, and nobody knows why; "
            f"{self._command} resume {container.path} lets it run on"
        )

    def _why_left(self, container: Container) -> str:
        return (
            f"{container} has stood still for long, and no checkpoint of it was seen meanwhile: "
            "somebody has paused it, or a checkpoint has left it so; unless its runtime still "
            f"writes an archive, {self._command} resume {container.path} lets it run on"
        )

    def _why_replaced(self, container: Container) -> str:
        return (
            f"{self._runtime} takes {container} for one in an unknown state, and the kubelet will "
            "replace it in about a minute; a restart of containerd before that keeps it"
        )

    def _say(self, what: str, text: str, container: Container | None = None) -> None:
        """Once in a row for each container."""
        about = "" if container is None else container.id
        if self._said.get(about) != text:
            self._said[about] = text
            self._tell(Event(what=what, text=text, container=container))
