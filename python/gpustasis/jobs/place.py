# SPDX-License-Identifier: Apache-2.0
"""Where a rank's things are on its host, and what its keeper leaves there for the next one."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from gpustasis.errors import CheckpointError, JobError
from gpustasis.files import changeable_by_others, make_directories, replace_file
from gpustasis.jobs import owner
from gpustasis.locked_file import KEEPER_NAME, tell
from gpustasis.task import boot_id, read_task

log = logging.getLogger(__name__)

STATE_DIRECTORY = "/run/gpustasis/jobs"
_NAME = "state.json"
_MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What there is to undo or to finish, of this boot only.

    pid, start_time: of the root of the tasks; 0: there are none. epoch: that was begun last.
    images: where it dumps to, or is restored from. cuda, network: are locked, or may be. life: of
    the job, that the tasks belong to (lives.py); 0: it is not recovered. criu, criu_start: the
    process that an engine has started for a container (contained.py); 0: there is none. last: the
    whole checkpoint that the tasks were in last, or came from; 0: none, or it is not known. stamp:
    of the rank's dump in it. told: the epoch on whose verdict it was not decided yet when the
    keeper was told to end; 0: none.
    """

    boot: str
    pid: int = 0
    start_time: int = 0
    epoch: int = 0
    images: str = ""
    cuda: bool = False
    network: bool = False
    life: int = 0
    criu: int = 0
    criu_start: int = 0
    last: int = 0
    stamp: str = ""
    told: int = 0

    @property
    def lives(self) -> bool:
        """Whether the root is there, and the same process."""
        try:
            return self.pid > 0 and read_task(self.pid).start_time == self.start_time
        except CheckpointError:
            return False

    def is_dumping_to(self, place: Place, images: Path) -> bool:
        """Whether the epoch under way is a checkpoint that dumps, or has dumped, to `images`."""
        return self.images == str(images) and images == place.images(self.epoch)


@dataclass(frozen=True, slots=True)
class Place:
    """directory: of the rank's checkpoints and of what its command prints; it must be the same at a
    restore. run: of what is of this boot only."""

    job: str
    rank: int
    directory: Path
    run: Path

    @property
    def log(self) -> Path:
        return self.directory / "output.log"

    @property
    def script(self) -> Path:
        return self.directory / ".gate"

    @property
    def seat(self) -> Path:
        """Not in `run`: a program that is restored looks for it where it was."""
        return self.directory / ".safe-point"

    def images(self, epoch: int) -> Path:
        return self.directory / f"epoch-{epoch:08d}"

    def make(self) -> None:
        """Raises JobError, also if others than root and this user can change what is there, or if
        it is another job's."""
        try:
            make_directories(str(self.directory), 0o700)
            make_directories(str(self.run), 0o700)
            for place in (self.directory, self.run):
                wrong = next(changeable_by_others(str(place), owners=(0, os.geteuid())), None)
                if wrong is not None:
                    raise JobError(
                        f"{place} cannot be used: {wrong}; whoever can change it decides what is "
                        "run as this user"
                    )
        except OSError as exc:
            raise JobError(f"cannot make {exc.filename}: {exc.strerror}") from exc
        owner.own(self.directory, self.job)

    def only_keeper(self, waits: Callable[[], bool] | None = None) -> int:
        """Be the keeper of the rank on this host for as long as the descriptor is open. Raises
        JobError if there is one. waits: called now and then until there is none any more; false:
        it is not waited for."""
        descriptor = os.open(self.run / KEEPER_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                if waits is not None and waits():
                    continue
                os.close(descriptor)
                raise JobError(
                    f"job {self.job}: rank {self.rank} has a keeper on this host, which holds "
                    f"{self.run}; end that one first"
                ) from exc
            else:
                return descriptor

    @contextmanager
    def kept(
        self, waits: Callable[[], bool] | None, *, preemptible: bool
    ) -> Iterator[Callable[..., None]]:
        """As only_keeper. preemptible: SIGTERM has the job checkpointed. What it gives says to
        `gpustasis preempt` how the keeper is: that it cannot be told harms no job."""
        held = self.only_keeper(waits)
        one_at_a_time, is_over = threading.Lock(), threading.Event()

        def says(**facts: object) -> None:
            """By any thread: one that comes late must not write to what has got the number of the
            descriptor."""
            with one_at_a_time:
                if is_over.is_set():
                    return
                try:
                    tell(held, {"preemptible": preemptible, **facts, "keeper": os.getpid()})
                except OSError as exc:
                    log.warning("cannot write %s: %s", self.run / KEEPER_NAME, exc.strerror)

        try:
            says()
            yield says
        except CheckpointError as exc:
            says(because=str(exc))
            raise
        finally:
            with one_at_a_time:
                is_over.set()
                os.close(held)

    def load(self) -> State:
        """As the last keeper left it; of another boot nothing is left. Raises JobError."""
        boot = boot_id().hex()
        place = self.run / _NAME
        try:
            with place.open("rb") as file:
                value = json.loads(file.read(_MAX_BYTES))
            state = State(**value)
            for name, wanted in State.__annotations__.items():
                if type(getattr(state, name)).__name__ != wanted:
                    raise TypeError(f"{name} is no {wanted}")
        except FileNotFoundError:
            return State(boot=boot)
        except (OSError, ValueError, TypeError) as exc:
            raise JobError(f"{place} cannot be used: {exc}") from exc
        return state if state.boot == boot else State(boot=boot)

    def store(self, state: State) -> None:
        """Raises OSError."""
        directory = os.open(self.run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # What says nothing is left out: an older build may not know the field.
            every = {one.name: (getattr(state, one.name), one.default) for one in fields(state)}
            said = {name: value for name, (value, default) in every.items() if value != default}
            replace_file(directory, _NAME, json.dumps(said).encode(), 0o600, durable=False)
        finally:
            os.close(directory)


def place_of(job: str, rank: int, directory: Path, run: Path) -> Place:
    """Of a rank of a job whose checkpoints are below `directory`."""
    return Place(job, rank, directory.absolute() / f"rank-{rank}", run.absolute() / job / f"{rank}")
