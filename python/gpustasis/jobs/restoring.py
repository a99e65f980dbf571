# SPDX-License-Identifier: Apache-2.0
"""The tasks of a rank in an epoch that restores an earlier one: all ranks run again, or none."""

from __future__ import annotations

import json
from pathlib import Path

from gpustasis.criu import run
from gpustasis.criu.images import read_pstree
from gpustasis.errors import CheckpointError, ImageError, JobError
from gpustasis.jobs import epochs, leftover, neighbour, verified
from gpustasis.jobs.dumps import DumpRecord, record_of, require_chain, require_same, stamp_of
from gpustasis.jobs.gate import unsignalled
from gpustasis.jobs.network import Network, own_addresses
from gpustasis.jobs.rank import Context, HasCriu
from gpustasis.jobs.spawning import make_log
from gpustasis.jobs.work import Order
from gpustasis.streaming.tree import Tree
from gpustasis.task import read_task

_ENDED_S = 60.0


class Restoring(HasCriu):
    """A rank.Part. Its dump is the restore, at whose end the tasks stand."""

    def __init__(self, context: Context, order: Order) -> None:
        super().__init__(context, order, context.place.images(order.restores))
        self._record: DumpRecord | None = None
        self._stamp = ""

    def look(self) -> None:
        """The dump is there, as it was committed, and its tasks can be made."""
        context, images = self.context, self.images
        if context.state.lives:
            raise JobError(
                f"{context.name} runs, as process {context.state.pid}: end the job before it is "
                "restored"
            )
        if context.gate.is_held():
            raise JobError(f"{context.name}: a criu still waits for a decision of an earlier epoch")
        record = self._read()
        if Path(record.directory) != images:
            raise JobError(
                f"{context.name}: its dump is in {record.directory} on {record.host}, and this "
                f"keeper has {images}: give the directory that it had, on that host or shared"
            )
        if neighbour.bring_back(record):
            make_log(context.place.log)  # which may be lost, too
        require_same(record)
        require_chain(record)
        for task in read_pstree(images):
            if Path(f"/proc/{task.pid}").exists():
                raise JobError(f"{context.name}: process {task.pid} exists, and is to be restored")
        if context.options.tcp_close or record.network == Network():
            return
        context.require_nft()
        leftover.require_unused(record.network.connections)
        own = own_addresses()
        for connection in sorted(record.network.connections):
            if connection.local not in own:
                raise JobError(
                    f"{context.name}: the connection of {connection} needs the address "
                    f"{connection.local}, which is not here: CRIU binds a socket to the address "
                    "that it had; add the address, or restore with --tcp-close"
                )

    def lock_cuda(self) -> None:
        """There is nothing yet."""

    def lock_network(self) -> None:
        """What an other rank sends, that is back before this one, must find no closed port."""
        context, record = self.context, self._read()
        self._pidfile.unlink(missing_ok=True)  # of an earlier one
        self.touched = True
        context.note(pid=0, epoch=self.order.number, images=str(self.images), cuda=False, told=0)
        if not context.options.tcp_close and record.network.connections | record.network.ports:
            context.require_nft()
            context.note(network=True)
            context.lock.take(record.network)
            leftover.end(record.network.connections)

    def dump(self) -> str:
        """Bring the tasks back; they stand."""
        context, images = self.context, self.images
        record = self._read()
        stamp = stamp_of(images)  # first: what is changed later is seen
        require_same(record)
        self._stamp = f"{record.digest} {stamp}"
        pidfile = self._pidfile
        closing = context.options.tcp_close
        settings = run.Settings(
            options={"tcp-established": not closing, "tcp-close": closing},
            extra=context.options.extra,
        )
        criu = unsignalled(context.options.criu)
        reached = self.criu.start(
            "pre-resume",
            lambda use: run.restore(criu, images, use, pidfile=pidfile),
            settings,
        )
        try:
            tree = self._restored()
            if tree is None or not reached:
                if tree is not None:  # they run: criu does not heed how its script ends
                    tree.close()
                raise JobError(f"{context.name}: criu has ended without asking")
            try:
                context.note(pid=tree.root)
                tree.require_all(images)
                if tree.is_ending():
                    raise JobError(f"{context.name}: its tasks are being killed")
            finally:
                tree.close()
        except CheckpointError as exc:  # the plugin has killed what it could not prove right
            self.release()
            raise self.criu.failed or exc from None
        return json.dumps({"version": 1, "restored": self.order.restores, "pid": tree.root})

    def release(self) -> None:
        """None of it may run. Tasks that ran before this epoch are none of it."""
        context = self.context
        if not self.is_touched():
            return
        while self.criu.is_there() and not context.gate.is_held():
            self.criu.wait()
        tree = Tree(context.state.pid) if context.state.lives else self._restored()
        if tree is not None:
            tree.kill()
        self.criu.end(yes=False)
        if tree is not None:
            ended = tree.all_ended(_ENDED_S, lambda: None)
            tree.close()
            if not ended:
                raise JobError(f"{context.name}: not every process has ended, of {tree.pids}")
        self._pidfile.unlink(missing_ok=True)  # the number is another process's from here on
        context.unlock_network()
        context.note(pid=0)

    @property
    def _pidfile(self) -> Path:
        """Where criu puts the root's pid as this host sees it, before it comes to the gate."""
        return self.context.place.run / "pid"

    def _restored(self) -> Tree | None:
        """What this epoch's criu has made, whether or not a keeper has noted it. None: there is no
        such process. Raises CheckpointError if that cannot be told: what criu has made would run
        once it is answered."""
        try:
            pid = int(self._pidfile.read_text())
        except (FileNotFoundError, ValueError) as exc:
            if not self.context.gate.is_held():
                return None
            raise JobError(
                f"{self.context.name}: criu waits, and {self._pidfile} does not say what it has "
                "made: it is not answered; end its tasks, and then criu"
            ) from exc
        try:
            if self._is_root(pid):
                return Tree(pid)
        except ImageError:
            raise
        except CheckpointError:
            if not _is_dead(pid):
                raise
        if left := self.criu.traced():
            raise JobError(
                f"{self.context.name}: the root of its tasks has ended, and criu holds process "
                f"{left[0]}: it is not answered; end that one, and then criu"
            )
        return None

    def _is_root(self, pid: int) -> bool:
        """Whether the process of this number is what criu has made, and not a later one. Raises
        CheckpointError."""
        task, state = read_task(pid), self.context.state
        is_noted = state.pid != pid or state.start_time == task.start_time
        return is_noted and task.inner_pid == read_pstree(self.images)[0].pid

    def finish(self, *, leave_running: bool) -> None:
        """They run. leave_running is always true: nobody begins another restore."""
        context = self.context
        self.criu.end(yes=True)
        context.unlock_network()
        if self.criu.failed is not None:
            raise self.criu.failed
        if not context.state.lives and context.state.life and context.options.check is None:
            return  # of a job that is recovered: how they have ended is told by their status
        if not context.state.lives and context.options.check is not None:
            # A host that has lost its power takes the keeper with it, or whoever ends both.
            is_lost = self.order.joined
            raise verified.not_back(context, self.order, "its tasks have ended", is_lost=is_lost)
        if not leave_running or not context.state.lives:
            raise JobError(f"{context.name}: its tasks have ended")
        if self._stamp:
            context.note(last=(self.order.restores, self._stamp))
        context.aftercare.wake()  # it may have come from memory
        verified.verify(context, self.order, str(self.images))

    def _read(self) -> DumpRecord:
        if self._record is None:
            context = self.context
            found = epochs.standing(context.store, context.keys, self.order.restores)
            if not found.is_whole or found.plan.world != context.world:
                raise JobError(
                    f"epoch {self.order.restores} is no whole checkpoint of {context.world} ranks"
                )
            whose = f"epoch {self.order.restores}, {context.name}"
            self._record = record_of(found.records[context.place.rank], whose)
        return self._record


def _is_dead(pid: int) -> bool:
    try:
        read_task(pid)
    except CheckpointError:
        return True
    return False
