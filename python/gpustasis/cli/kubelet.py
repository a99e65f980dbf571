# SPDX-License-Identifier: Apache-2.0
"""`gpustasis kubelet`: checkpoint containers of a cluster through its kubelets; list what they
made."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import click

from gpustasis.archive.layout import Engine
from gpustasis.cli import output
from gpustasis.cli.framework import Group
from gpustasis.errors import ArchiveError, EngineError
from gpustasis.runtimes import kubelet, kubelet_archives
from gpustasis.runtimes.kubeconfig import default_paths, open_access

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_TICK_S = 0.25
_CELL_LIMIT = 300  # characters
_SECOND = re.compile(r"\.\d+(?=Z$|[+-]\d\d:\d\d$)")  # fractions of one
_ENGINES = {
    Engine.PODMAN: "Podman",
    Engine.CRI_O: "CRI-O",
    Engine.CONTAINERD: "containerd",
    Engine.UNKNOWN: "-",
}
_SHORT_ID = 12  # characters of an id, as checkpointctl shows it

Outcome = kubelet.Made | EngineError


@click.group("kubelet", cls=Group)
def command() -> None:
    """Checkpoint containers of a cluster through its kubelets; list a node's archives."""


@command.command("checkpoint")
@click.argument("targets", nargs=-1, required=True, metavar="NAMESPACE/POD/CONTAINER[@NODE]...")
@click.option(
    "--node",
    "--address",
    "node",
    metavar="HOST[:PORT]",
    help="The kubelet of containers given without @NODE; port 10250 if none is named.",
)
@click.option(
    "--api-server",
    metavar="URL",
    help="Ask through this API server's proxy; nodes are then given by name.",
)
@click.option(
    "--kubeconfig",
    type=_FILE,
    help="Ask through the API server of this file's context, as its user.",
)
@click.option(
    "--context",
    metavar="NAME",
    help="The context of --kubeconfig, or of the file that kubectl reads.  [default: its current "
    "one]",
)
@click.option("--ca", type=_FILE, help="The CA that signed the server's certificate (PEM).")
@click.option("--cert", type=_FILE, help="The client's certificate (PEM), perhaps with its key.")
@click.option("--key", type=_FILE, help="The client's key (PEM).")
@click.option("--token-file", type=_FILE, help="Holds a bearer token.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.IntRange(1, 7 * 86400),
    default=kubelet.DEFAULT_TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="After that long a node's runtime gives up.",
)
@click.option(
    "--parallel",
    type=click.IntRange(1, 256),
    default=8,
    show_default=True,
    help="How many at once.",
)
def checkpoint(
    targets: tuple[str, ...],
    node: str | None,
    api_server: str | None,
    kubeconfig: Path | None,
    context: str | None,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    token_file: Path | None,
    timeout_s: int,
    parallel: int,
) -> None:
    """Have kubelets write checkpoint archives of containers, which run on.

    The archives are on the nodes, in /var/lib/kubelet/checkpoints there. Each container is tried;
    if one fails, so does this command at its end. Needs the extra `kubelet`.
    """
    with ExitStack() as stack:
        if kubeconfig is not None or context is not None:
            if any((api_server, ca, cert, key, token_file)):
                raise click.UsageError(
                    "--kubeconfig and --context say which server to ask and who you are: leave out "
                    "--api-server, --ca, --cert, --key and --token-file"
                )
            paths = [kubeconfig] if kubeconfig else default_paths(os.environ)
            access = stack.enter_context(open_access(paths, context))
        else:
            access = _named_access(api_server, ca, cert, key, token_file)
        _checkpoint(access, targets, node, timeout_s, parallel)


def _named_access(
    api_server: str | None,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    token_file: Path | None,
) -> kubelet.Access:
    if ca is None:
        raise click.UsageError("say which server to trust: --ca, or --kubeconfig")
    if cert is None and token_file is None:
        raise click.UsageError("say who you are: --cert (and --key), --token-file or --kubeconfig")
    return kubelet.Access(
        ca=ca,
        certificate=cert,
        key=key,
        token=None if token_file is None else kubelet.read_token(token_file),
        api_server=api_server,
    )


def _checkpoint(
    access: kubelet.Access,
    targets: tuple[str, ...],
    node: str | None,
    timeout_s: int,
    parallel: int,
) -> None:
    kubelet.check(access)
    wanted = [kubelet.parse_target(target, node) for target in targets]
    twice = sorted({target.path for target in wanted if wanted.count(target) > 1})
    if twice:
        raise click.UsageError(f"given twice: {', '.join(twice)}")

    def one(target: kubelet.Target) -> Outcome:
        try:
            return kubelet.checkpoint(access, target, timeout_s)
        except EngineError as exc:
            return exc

    outcomes = _all(one, wanted, parallel)
    output.answer(
        {"checkpoints": [_fields(*pair) for pair in outcomes.items()]}, lambda: _show(outcomes)
    )
    failed = [value for value in outcomes.values() if isinstance(value, EngineError)]
    if failed:
        raise EngineError(
            "\n".join(
                [f"{len(failed)} of {len(wanted)} checkpoints failed", *(f"  {e}" for e in failed)]
            )
        )


def _all(
    one: Callable[[kubelet.Target], Outcome], wanted: list[kubelet.Target], parallel: int
) -> dict[kubelet.Target, Outcome]:
    """The outcome of each, in the order asked for. Ctrl-C begins no more, and waits for those that
    are under way: a node would go on with them anyway."""
    interrupted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupted.append(number))
    with output.bars(count=True) as update, ThreadPoolExecutor(parallel) as pool:
        futures: dict[Future[Outcome], kubelet.Target] = {
            pool.submit(one, target): target for target in wanted
        }
        pending = set(futures)
        try:
            while pending:
                _, pending = wait(pending, _TICK_S, FIRST_COMPLETED)
                update("checkpointing", len(wanted) - len(pending), len(wanted))
                if interrupted:
                    interrupted.clear()
                    for future in pending:
                        future.cancel()
                    output.warn("no more are begun; waiting for those under way")
        finally:
            signal.signal(signal.SIGINT, before)
    return {
        target: EngineError(f"{target}: not begun") if future.cancelled() else future.result()
        for future, target in futures.items()
    }


def _show(outcomes: dict[kubelet.Target, Outcome]) -> None:
    rows = []
    for target, outcome in outcomes.items():
        if isinstance(outcome, EngineError):
            cells = ("failed", "-", "-")
        else:
            cells = ("done", f"{outcome.seconds:.2f}", " ".join(outcome.archives))
        rows.append((target.path, target.node, *cells))
    output.table(("CONTAINER", "NODE", "RESULT", "SECONDS", "ARCHIVE"), rows)


def _fields(target: kubelet.Target, outcome: Outcome) -> dict[str, object]:
    fields: dict[str, object] = asdict(target)
    if isinstance(outcome, EngineError):
        return fields | {"ok": False, "error": str(outcome)}
    return fields | {"ok": True, "archives": outcome.archives, "seconds": outcome.seconds}


@command.command("list")
@click.argument(
    "directory",
    default=kubelet_archives.DIRECTORY,
    type=click.Path(file_okay=False, path_type=Path),
)
def list_archives(directory: Path) -> None:
    """Show the checkpoint archives in DIRECTORY, a node's if none is named."""
    archives, errors = kubelet_archives.list_archives(directory)
    titles = ("CONTAINER", "IMAGE", "ID", "RUNTIME", "CREATED", "ENGINE")
    output.answer(
        {"archives": [_archive_fields(archive) for archive in archives]},
        lambda: output.table(
            (*titles, "CHKPT SIZE", "ROOT FS DIFF SIZE"), map(_archive_cells, archives)
        ),
    )
    if errors:
        raise ArchiveError("\n".join(map(str, errors)))


def _archive_fields(archive: kubelet_archives.ListedArchive) -> dict[str, object]:
    fields: dict[str, object] = {"path": str(archive.path)} | asdict(archive.facts)
    sizes = {
        "checkpoint_bytes": archive.checkpoint_bytes,
        "rootfs_diff_bytes": archive.rootfs_diff_bytes,
    }
    return fields | sizes


def _archive_cells(archive: kubelet_archives.ListedArchive) -> tuple[str, ...]:
    facts = archive.facts
    words = (
        *(facts.container_name, facts.image, facts.container_id[:_SHORT_ID]),
        *(facts.runtime, _SECOND.sub("", facts.created), _ENGINES[facts.engine]),
    )
    sizes = (_size(archive.checkpoint_bytes), _size(archive.rootfs_diff_bytes))
    return (*(_cell(word) for word in words), *sizes)


def _cell(text: str) -> str:
    """What an archive says, not longer than a line."""
    return text[:_CELL_LIMIT] or "-"


def _size(count: int | None) -> str:
    """As checkpointctl writes it: 1.7 MiB."""
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
