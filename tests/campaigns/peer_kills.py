# SPDX-License-Identifier: Apache-2.0
"""Who copies a local checkpoint to a neighbour, who keeps the copy, or both are killed with SIGKILL
in each phase of `gpustasis peer copy`.

The copy is there whole, or not at all: every file of it, also CRIU's, is what was sent. The record
beside the checkpoint says that there is one only if there is. The checkpoint itself is not touched.
The copy of an older one, whose place the new copy takes, is there until that is whole; that of its
parent is there always. A keeper that is started again removes what was left of a copy, and a new
copy succeeds. No agent takes part."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from random import Random

from campaigns.hits import Hits
from campaigns.ram_dump import FAILED, Older, make_older
from campaigns.rig import CRIU_TIMEOUT_S, SETTLE_S, Rig, with_config
from campaigns.tally import Tally
from campaigns.victims import WATCH_S, kill_one, kill_or_done, signal_all
from gpustasis.draining.waiting import peer_of
from gpustasis.errors import PeerError
from gpustasis.image.peer_record import PEER_RECORD
from gpustasis.image.verification import verify_directory
from gpustasis.peers.copies import Copies, Copy, is_key, is_sent
from gpustasis.peers.copying import copy, discard, fetch, list_copies, require_peer
from support.arena import ram, restore
from support.peers import Nodes, make_nodes, write_config

BEGIN, SENDING, CHECKING, RECORDING, END = (
    "begin",
    "sending",
    "checking there",
    "recording",
    "end",
)
_ORDER = (BEGIN, SENDING, CHECKING, RECORDING, END)
PHASES = _ORDER[1:-1]
_COMMAND = (sys.executable, "-m", "gpustasis", "peer")
_MIB = 32  # of the job
_RATE = "96M"
_MEASURED = 3  # copies
_LIMIT = 12  # copies for each hit that is asked for
_USED_EACH = 5  # of copies, one in so many is restored


class Side(StrEnum):
    SENDER = "the sender"
    KEEPER = "the keeper"
    BOTH = "both"


@dataclass(slots=True)
class Sent:
    """A local checkpoint, and what its copy is called, once there was one."""

    local: Older
    key: str = ""

    @property
    def images(self) -> Path:
        return self.local.images


@dataclass(slots=True)
class Place:
    """new: what is copied, and size: of its files, as they are sent. older, below: of the same
    store, copied before; new is built on below. keeper: the process. left: how many copies were
    whole when somebody was killed."""

    rig: Rig
    nodes: Nodes
    new: Sent
    older: Sent
    below: Sent
    configs: tuple[Path, Path]
    size: int = 0
    left: int = 0
    keeper: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def images(self) -> Path:
        return self.new.images

    @property
    def every(self) -> tuple[Sent, Sent, Sent]:
        return self.new, self.older, self.below

    @property
    def copies(self) -> Path:
        return self.nodes.keeper.directory

    def phase(self) -> str:
        """Of a copy, by what is there."""
        if (self.images / PEER_RECORD).exists():
            return END
        if self.new.key and (self.copies / self.new.key).exists():
            return RECORDING
        with suppress(FileNotFoundError):
            for part in self.copies.glob(".*.part"):
                size = sum(path.lstat().st_size for path in part.iterdir())
                return CHECKING if size >= self.size else SENDING
        return BEGIN

    def start_keeper(self) -> None:
        with self.copies.with_suffix(".log").open("ab") as log:
            words = [*_COMMAND, "serve", "--config", str(self.configs[0])]
            keeper = subprocess.Popen(words, env=dict(self.rig.environ), stdout=log, stderr=log)
        self.keeper[:] = [keeper]
        deadline = time.monotonic() + SETTLE_S
        while True:
            try:
                return require_peer(self.nodes.sender)
            except PeerError as refused:
                assert keeper.poll() is None, "the keeper does not start"
                assert time.monotonic() < deadline, refused
                time.sleep(0.01)

    def start_copy(self) -> subprocess.Popen[bytes]:
        words = [str(self.images), "--config", str(self.configs[1]), "--rate-limit", _RATE]
        return subprocess.Popen(
            [*_COMMAND, "copy", *words],
            env=dict(self.rig.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


@contextmanager
def _place(rig: Rig, arena: Path) -> Iterator[Place]:
    """With a keeper that runs."""
    folder = rig.images()
    nodes = make_nodes(folder / "certificates", arena.parent / "peers")
    configs = (
        write_config(folder / "keeper.toml", nodes.keeper),
        write_config(folder / "sender.toml", nodes.sender),
    )
    older, below = make_older(rig, arena), make_older(rig, arena, mib=_MIB)
    on_it = with_config(rig, ram(arena, parent=str(below.images)))
    new = make_older(on_it, arena, mib=_MIB)
    place = Place(rig, nodes, Sent(new), Sent(older), Sent(below), configs)
    try:
        place.start_keeper()
        yield place
    finally:
        for keeper in place.keeper:
            keeper.kill()
            keeper.wait()
        for one in place.every:
            one.local.job.end()


def run(
    rig: Rig,
    arena: Path,
    random: Random,
    each: int,
    sides: Sequence[Side] = tuple(Side),
    phases: Sequence[str] = PHASES,
) -> Tally:
    """Copies of one local checkpoint, made on `rig` (ram_dump.slow_ram), that are killed, until
    each of the phases was hit `each` times. sides: which of them, in turn. Copies that end before
    they are killed are no trials."""
    tally = Tally()
    hits = Hits(phases, sides, each)
    with _place(rig, arena) as place:
        spans = _measure(place)
        for index, phase in enumerate(hits.aims(tally, _LIMIT)):
            side = hits.whose_turn(phase, sides)
            copying, found = place.start_copy(), phase
            try:
                found, done = _kill(place, copying, side, phase, random.uniform(0, spans[phase]))
                if done:
                    hits.add(found, side)
                tally.counts.update(["trials", f"in {found}"] if done else ["too late"])
                tally.counts[f"{side}: {_judge(place, copying)}"] += done
                tally.counts["restored as it was left"] += _use_left(place)
                _copy_again(place, index)
            except FAILED as wrong:
                tally.failures.append(f"{side} killed in {found}: {wrong}")
                _begin_anew(place)
        for one in place.every:
            try:
                one.local.require_exact(rig)
            except FAILED as wrong:
                tally.failures.append(f"the local checkpoint {one.images.name}: {wrong}")
    hits.note(tally)
    return tally


def _measure(place: Place) -> dict[str, float]:
    """The seconds that each phase of an undisturbed copy lasts, at most."""
    for one in reversed(place.every):
        done = copy(one.images, place.nodes.sender)
        assert done.copies == 1
        place.size, one.key = done.bytes, done.key
    parents = {one.key: one.parent for one in Copies(place.nodes.keeper).all()}
    assert parents[place.new.key] == place.below.key, "it is not built on its parent"
    spans: dict[str, float] = defaultdict(float)
    for _ in range(_MEASURED):
        _forget(place)
        copying = place.start_copy()
        begun: dict[str, float] = {}
        while copying.poll() is None:
            phase, now = place.phase(), time.monotonic()
            spans[phase] = max(spans[phase], now - begun.setdefault(phase, now))
            time.sleep(WATCH_S)
        assert copying.returncode == 0
    _forget(place)
    return spans


def _kill(
    place: Place, copying: subprocess.Popen[bytes], side: Side, phase: str, seconds: float
) -> tuple[str, bool]:
    """At that time after the begin of the phase. In which it was, and whether it was in time."""
    later = _ORDER[_ORDER.index(phase) :]
    while copying.poll() is None and place.phase() not in later:
        time.sleep(WATCH_S)
    deadline = time.monotonic() + seconds
    while copying.poll() is None and time.monotonic() < deadline:
        time.sleep(WATCH_S)
    (keeper,) = place.keeper
    signal_all([one.pid for one in (copying, keeper) if one.poll() is None], signal.SIGSTOP)
    found, done = place.phase(), True
    assert copying.poll() in (None, 0), f"nobody was killed, and the copy fails: {copying.poll()}"
    if side is not Side.SENDER:
        assert kill_one(keeper), f"the keeper has ended by itself, with {keeper.returncode}"
    if side is not Side.KEEPER:
        done = kill_or_done(copying, "the sender")
    for one in (copying, keeper):
        if one.returncode is None:
            one.send_signal(signal.SIGCONT)
    copying.wait(CRIU_TIMEOUT_S)
    return found, done and found not in (BEGIN, END)


def _judge(place: Place, copying: subprocess.Popen[bytes]) -> str:
    """What became of the copy. Raises AssertionError: it may not."""
    (keeper,) = place.keeper
    if keeper.poll() is None:
        _await_swept(place)
    else:
        whole = _require_whole_if_there(place)  # before anything is swept
        place.start_keeper()
        assert _require_whole_if_there(place) == whole, "the start of the keeper has changed it"
    left = [name for name in os.listdir(place.copies) if not is_key(name)]
    assert not left, f"the keeper has {left}"
    whole = _require_whole_if_there(place)
    older = _require_whole_if_there(place, place.older)
    assert whole or older, "the older copy is gone, and the new one is not there"
    assert _require_whole_if_there(place, place.below), "the copy of its parent is gone"
    there = {one.key for one in _list(place)}
    wanted = {place.below.key}
    wanted |= {place.new.key} if whole else set()
    wanted |= {place.older.key} if older else set()
    assert there == wanted, f"the keeper says that it has {there}, and there are {wanted}"
    here = {one.key for one in Copies(place.nodes.keeper).all()}
    assert here == there, f"`peer list --here` says {here}, and the keeper {there}"
    record = peer_of(place.images)
    assert record is None or whole, "a copy is recorded that is not there"
    if copying.returncode == 0:  # whoever was to be killed
        assert record is not None, "the sender has succeeded, and recorded nothing"
    for one in place.every:
        one.local.require_untouched()
    if whole and older:
        return "both are there"
    return "it is there, whole" if whole else "the older one is there"


def _require_whole_if_there(place: Place, sent: Sent | None = None) -> bool:
    """The copy of the new one, or of that."""
    one = sent or place.new
    directory = place.copies / one.key
    if not directory.exists():
        return False
    problems = verify_directory(directory).problems
    assert not problems, f"the copy is damaged: {problems[0]}"
    of_images, of_arena = one.local.files
    wanted = {name: digest for name, (_, digest) in (of_images | of_arena).items() if is_sent(name)}
    found = {path.name: path for path in directory.iterdir() if is_sent(path.name)}
    assert set(found) == set(wanted), f"of the copy's files: {sorted(set(found) ^ set(wanted))}"
    for name, path in found.items():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert digest == wanted[name], f"the copy has another {name} than was sent"
    return True


def _await_swept(place: Place) -> None:
    """A keeper that lives removes what it has of a copy whose sender is gone, or keeps it whole,
    and then removes the older one."""
    deadline = time.monotonic() + SETTLE_S
    both = {place.new.key, place.older.key}
    while not all(map(is_key, names := os.listdir(place.copies))) or both <= {*names}:
        assert time.monotonic() < deadline, f"left: {names}"
        time.sleep(0.01)


def _use_left(place: Place) -> bool:
    """Of the copies that are whole though somebody was killed, some are restored."""
    place.left += (is_there := _require_whole_if_there(place))
    used = is_there and place.left % _USED_EACH == 1
    if used:
        _restore_copy(place, in_place=place.left % (2 * _USED_EACH) == 1)
    return used


def _copy_again(place: Place, index: int) -> None:
    """A new copy succeeds, and takes the place of the older one. Some are restored."""
    done = copy(place.images, place.nodes.sender)
    assert done.key == place.new.key
    if done.copies:
        there = {one.key for one in _list(place)}
        assert there == {place.new.key, place.below.key}, f"the keeper says that it has {there}"
    record = peer_of(place.images)
    assert record is not None
    assert record.key == place.new.key
    assert _require_whole_if_there(place)
    place.new.local.require_untouched()
    if index % _USED_EACH == 0:
        _restore_copy(place, in_place=index % (2 * _USED_EACH) == 0)
    _forget(place)


def _restore_copy(place: Place, *, in_place: bool) -> None:
    """From where the keeper has it, or fetched."""
    out = place.rig.images()
    if in_place:  # criu's logs go beside the directory that it is given
        out.rmdir()
        out.symlink_to(place.copies / place.new.key)
    else:
        assert place.nodes.sender.peer is not None
        fetch(place.nodes.sender.peer, place.nodes.sender, place.new.key, out)
        assert not verify_directory(out).problems
    restore(place.rig, place.new.local.job, out)
    place.new.local.job.end()
    place.rig.settle(out)


def _list(place: Place) -> list[Copy]:
    assert place.nodes.sender.peer is not None
    return list_copies(place.nodes.sender.peer, place.nodes.sender)


def _forget(place: Place) -> None:
    """As if it had never been copied, and the older one had."""
    assert place.nodes.sender.peer is not None
    discard(place.nodes.sender.peer, place.nodes.sender, place.new.key)
    (place.images / PEER_RECORD).unlink()
    copy(place.older.images, place.nodes.sender)  # nothing is sent if it is there still


def _begin_anew(place: Place) -> None:
    """After a failure."""
    for keeper in place.keeper:
        keeper.kill()
        keeper.wait()
    shutil.rmtree(place.copies)
    (place.images / PEER_RECORD).unlink(missing_ok=True)
    place.start_keeper()
    for one in (place.below, place.older):
        copy(one.images, place.nodes.sender)
