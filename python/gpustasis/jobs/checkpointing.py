# SPDX-License-Identifier: Apache-2.0
"""The tasks of a rank in an epoch that is a checkpoint."""

from __future__ import annotations

import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

from gpustasis.criu import run
from gpustasis.criu.images import prepare_directory
from gpustasis.criu.plugin import Setting
from gpustasis.draining.syncing import make_durable
from gpustasis.errors import CheckpointError, JobError, StoreError
from gpustasis.jobs import communicators, neighbour
from gpustasis.jobs.aborted import clear_aborted
from gpustasis.jobs.cuda import (
    cuda_processes,
    load_driver,
    lock_cuda,
    unlock_cuda,
)
from gpustasis.jobs.dumpable import require_dumpable
from gpustasis.jobs.dumps import (
    DumpRecord,
    content_of,
    identity_of,
    seal_of,
    stamp_of,
)
from gpustasis.jobs.gate import unsignalled
from gpustasis.jobs.neighbour import CommitAt, copy_out
from gpustasis.jobs.network import Network, look, own_addresses
from gpustasis.jobs.parents import find_parent, is_between
from gpustasis.jobs.rank import Context, HasCriu
from gpustasis.jobs.records import addresses_of
from gpustasis.jobs.safe_point import Council, let_go, stop_all
from gpustasis.jobs.stopping import killed
from gpustasis.jobs.work import Order
from gpustasis.peers.config import Config
from gpustasis.streaming.tree import Tree
from gpustasis.task import is_of_ipc_job

log = logging.getLogger(__name__)
_IN_MEMORY: dict[str, Setting] = {"tier": "ram", "when_full": "refuse"}  # all ranks stand by then
_DURABLE: dict[str, Setting] = {"tier": "disk"}

_ENDING_S = 5.0  # for tasks that are being killed, before they are killed once more
_ENDED_S = 60.0
_ASK_AGAIN_S = 0.5  # a store that is away
_LET_GO_S = 60.0  # for the other ranks, if this keeper knows of no safe points
_LOOPBACK = ("127.", "::1")


class Checkpointing(HasCriu):
    """A rank.Part."""

    def __init__(self, context: Context, order: Order) -> None:
        super().__init__(context, order, context.place.images(order.number))
        self._tree: Tree | None = None
        self._seen, self._network = Network(), Network()  # before the lock, and behind it
        self._parent: Path | None = None  # what the dump is built on
        self._stamp = ""  # of the dump
        self._is_between = False
        self._evidence: bool | None = None  # another keeper has looked
        self._neighbour: Config | None = None  # that gets a copy
        self._copied: tuple[str, str] | None = None  # where, its name: before it is sent
        self._council = Council(
            *(context.store, context.keys, order.number),
            (context.place.rank, context.world),
            has_stopped=order.joined,
        )

    def look(self) -> None:
        """May the tasks be dumped? Nothing is touched. A program that has safe points stands at
        one afterwards; what it had open until then does not count."""
        context = self.context
        require_dumpable(context, self.images)
        self._evidence = self._is_evidence()
        alone = context.aftercare.no_copy(self._goes_on)  # here, where the tasks run meanwhile
        # Evidence stays, and a neighbour keeps what the next checkpoints replace.
        at = CommitAt.DURABLE if self._evidence else context.options.commit_at
        self._neighbour = neighbour.require(context.name, at, alone)
        stands = context.options.safe_point_s > 0 and not self._evidence
        if stands:
            self._stop_program()
        with closing(Tree(context.state.pid)) as tree:
            self._seen = look(tree.pids)
            self._require_known(self._seen)
            communicators.require(context, cuda_processes(tree.pids), stands=stands)
        self._is_between = is_between(context, self.order)
        self._parent = find_parent(context) if self._is_between else None

    def _is_evidence(self) -> bool:
        """Whether it is made of a job that hangs, whose programs come to no safe point: as stored
        with the epoch, the same for all. Raises StoreError."""
        key = self.context.keys.evidence(self.order.number)
        return key in self.context.store.read(key).entries

    def _stop_program(self) -> None:
        context = self.context
        who = f"{context.name}, process {context.state.pid}"

        def require() -> None:
            if self.stopping.is_set():
                raise JobError(f"{who}: the epoch is over before its program was at a safe point")
            if not context.state.lives:
                raise JobError(f"{who}: has ended before its program was at a safe point")

        stop_all(context.seat, self._council, who, context.options.safe_point_s, require)

    def _let_go(self) -> None:
        """A program that stands at a safe point, or comes to one, goes on."""
        context = self.context
        limit_s = context.options.safe_point_s or _LET_GO_S
        let_go(context.seat, self._council, limit_s, lambda: context.state.lives)

    def _require_known(self, network: Network) -> None:
        """Connections lead to other ranks, as far as addresses tell."""
        context = self.context
        if network == Network() or context.options.tcp_close:
            return
        context.require_nft()
        if context.options.outside or not network.connections:
            return
        keys = [context.keys.addresses(rank) for rank in range(context.world)]
        known: set[str] = set(self._addresses())
        for key, entry in context.store.read(*keys).entries.items():
            known.update(map(str, addresses_of(key, entry)["addresses"]))
        for connection in sorted(network.connections):
            if connection.remote not in known and not connection.remote.startswith(_LOOPBACK):
                raise JobError(
                    f"{context.name}: the connection of {connection} leads to no rank of the job: "
                    "close it first, or allow it with --outside"
                )

    def _addresses(self) -> frozenset[str]:
        """Of the rank."""
        return own_addresses()

    def lock_cuda(self) -> None:
        """Work that was given to the GPUs ends; new work waits."""
        context = self.context
        self.touched = True
        context.note(epoch=self.order.number, images="", cuda=True)
        tree = Tree(context.state.pid)
        try:
            using = cuda_processes(tree.pids)
        finally:
            tree.close()
        if not using:
            return
        lock = partial(lock_cuda, load_driver(), timeout_ms=context.options.cuda_timeout_ms)
        # One may wait on its GPU for another. Not in a job of CUDA IPC, as in the plugin.
        with ThreadPoolExecutor(1 if any(map(is_of_ipc_job, using)) else len(using)) as pool:
            for _ in pool.map(lock, using):
                pass

    def lock_network(self) -> None:
        """From here on nothing that the others send is answered, and nothing is sent."""
        context = self.context
        tree = Tree(context.state.pid)
        try:
            pids = tree.pids
            if context.options.tcp_close:
                return
            if self._seen == Network():
                self._seen = look(pids)
            if self._seen != Network():
                context.require_nft()
                context.note(network=True)
                self._network = context.lock.take_of(pids, self._seen)
        finally:
            tree.close()

    def dump(self) -> str:
        """The record, with criu at the gate."""
        context, images = self.context, self.images
        prepare_directory(images)
        context.note(images=str(images))
        pid = context.state.pid
        closing = context.options.tcp_close
        tier = _IN_MEMORY if self._neighbour else _DURABLE  # whatever the configuration says
        settings = run.Settings(
            plugin={"found_locked": "dump", **tier, **self._built_on()},
            options={"tcp-established": not closing, "tcp-close": closing},
            extra=("--network-lock", "skip", *context.options.extra),
        )
        criu, leave = unsignalled(context.options.criu), self.order.leave_running
        reached = self.criu.start(
            "post-dump",
            lambda use: run.dump(criu, pid, images, use, leave_running=leave),
            settings,
        )
        try:
            if not reached:
                raise self.criu.failed or JobError(f"{context.name}: criu has ended without asking")
            return self._recorded()
        except BaseException:
            is_told = reached and self.stopping.is_set()  # to end early
            if self._parent is not None and not is_told:  # it may be to blame: the next is full
                context.note(last=(0, ""))
            raise

    def _recorded(self) -> str:
        """The record of what lies in self.images, of tasks that stand. By now it is on the disk, or
        the neighbour has a copy."""
        images, pid = self.images, self.context.state.pid
        self._tree = Tree(pid)
        self._tree.require_all(images)
        self._require_locked()
        copied_s = 0.0
        if self._neighbour is None:
            make_durable(images)
        else:
            alone = self.context.aftercare.no_copy(self._goes_on)
            known = (alone, self._goes_on, self._note_copy)
            copied_s = copy_out(images, self._neighbour, *known).seconds
        stamp = stamp_of(images)  # first: what is changed later is seen
        size, digest = seal_of(images) if self._copied is None else content_of(images)
        self._stamp = f"{digest} {stamp}"
        identity, parent = identity_of(images)
        if self._parent is not None and not parent:
            log.info("%s: a full dump: %s ends a chain", self.context.name, self._parent)
        return DumpRecord(
            id=identity,
            parent=parent,
            directory=str(images),
            host=socket.gethostname(),
            bytes=size,
            digest=digest,
            pid=pid,
            dump_ms=round((self.criu.seconds + copied_s) * 1000),
            addresses=tuple(sorted(self._addresses())),
            network=self._network,
            peer=self._copied[0] if self._copied else "",
            key=self._copied[1] if self._copied else "",
        ).to_text()

    def _note_copy(self, peer: str, key: str) -> None:
        self._copied = (peer, key)
        self.context.aftercare.sent(self.images, peer, key)

    def _goes_on(self) -> bool:
        return not self.stopping.is_set()

    def _built_on(self) -> dict[str, Setting]:
        if self._parent is None:
            return {"incremental": False}
        return {"parent": str(self._parent), "max_chain": self.context.options.max_chain}

    def _require_locked(self) -> None:
        """Nothing was connected after the lock, which does not hold it then. They stand still."""
        if self.context.options.tcp_close or self._tree is None:
            return
        found = look(self._tree.pids)
        new = sorted(found.connections - self._network.connections)
        ports = sorted(found.ports - self._network.ports)
        if new or ports:
            what = f"the connection of {new[0]}" if new else f"port {ports[0]}"
            raise JobError(
                f"{self.context.name}: {what} was opened after the network was locked; try again"
            )

    def release(self) -> None:
        """The tasks run on; what was dumped is of no use, and removed."""
        try:
            self._undo()
        finally:
            self._let_go()

    def _undo(self) -> None:
        if not self.is_touched():
            if self.order.joined and self.images == self.context.place.images(self.order.number):
                clear_aborted(self.context, self.order.number)
            return
        is_ours = self.context.state.images == str(self.images)  # this epoch has made it
        copied = self._copied or (self.context.aftercare.copy_of(self.images) if is_ours else None)
        self.criu.end(yes=False)
        try:
            self._bring_back()
        finally:
            if copied is not None:
                self.context.aftercare.forget(*copied)
        if is_ours:
            self._remove_images()

    def _remove_images(self) -> None:
        neighbour.remove(self.images)

    def finish(self, *, leave_running: bool) -> None:
        """Kill them, or let them run on."""
        context, state = self.context, self.context.state
        if state.epoch != self.order.number and state.lives:
            self._let_older_go()
            raise JobError(
                f"{context.name}: process {state.pid} was not dumped by epoch "
                f"{self.order.number}: it is left as it is"
            )
        try:
            if leave_running:
                self.criu.end(yes=True)
                try:
                    self._bring_back()
                finally:
                    self._let_go()
                    context.note(last=(self.order.number if self._stamp else 0, self._stamp))
            else:
                self._end_tasks()
                self._let_go()  # what is restored goes on by itself
        finally:
            if self._evidence is not None:
                self._let_older_go()
            context.note(images="")  # it is committed: nobody may remove it as undone
            context.aftercare.wake()
            if self._evidence is None:
                self._let_older_go()

    def _let_older_go(self) -> None:
        """Its copy is of a committed epoch: those of older ones can go, unless this is evidence,
        which no restore wants. A store that is away is waited for: without it this keeper settles
        nothing, and should it be killed, the next one comes here again."""
        copied = self._copied or self.context.aftercare.copy_of(self.images)
        while copied is not None and self._evidence is None:
            try:
                self._evidence = self._is_evidence()
            except StoreError:
                time.sleep(_ASK_AGAIN_S)
        if copied is not None and not self._evidence:
            self.context.aftercare.committed(self.images, *copied, is_base=self._is_between)

    def _end_tasks(self) -> None:
        context = self.context
        tree = self._tree
        if tree is None and context.state.lives:
            tree = Tree(context.state.pid)
        slipped = self.criu.slipped()
        self.criu.end(yes=True)
        if tree is not None and (slipped or not tree.all_ended(_ENDING_S, lambda: None)):
            tree = killed(tree)
            if not tree.all_ended(_ENDED_S, lambda: None):
                raise JobError(f"{context.name}: not every process has ended, of {tree.pids}")
        self._close_tree(tree)
        context.unlock_network()
        context.note(pid=0, cuda=False)

    def _bring_back(self) -> None:
        """Wait until they have all that is theirs, and unlock them, whatever is wrong with them:
        nobody does it later."""
        context = self.context
        wrong: list[str] = []
        self._close_tree(self._tree)
        try:
            if not context.state.lives:
                wrong.append(f"{context.name}: its tasks have ended")
            else:
                with closing(Tree(context.state.pid)) as tree:
                    wrong += self._unlock(tree)
        except CheckpointError as exc:
            wrong.append(str(exc))
        finally:
            context.unlock_network()
        if wrong:
            raise JobError("; ".join(wrong))

    def _unlock(self, tree: Tree) -> list[str]:
        """What is wrong with the tasks. A criu that has succeeded has brought back all that is
        theirs: they need not wait until that is looked at. Of another one the plugin's worker does
        it, after criu's end. Where no criu was, nothing has to be brought back."""
        context = self.context
        has_succeeded = self.criu.done is not None
        wrong: list[str] = []
        if not has_succeeded and context.state.images:
            wrong += self._why_not_running(tree)
        locked = unlock_cuda(tree.pids) if context.state.cuda else []
        context.note(cuda=bool(locked))
        context.unlock_network()
        if has_succeeded:
            wrong += self._why_not_running(tree)
        return wrong + locked

    def _why_not_running(self, tree: Tree) -> list[str]:
        try:
            looked = tree.why_not_running(self.images)
        except Exception as exc:  # noqa: BLE001 - they are unlocked all the same
            looked = str(exc) or type(exc).__name__
        return [looked] if looked else []

    def _close_tree(self, tree: Tree | None) -> None:
        if tree is not None:
            tree.close()
        self._tree = None
