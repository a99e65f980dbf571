# SPDX-License-Identifier: Apache-2.0
"""`gpustasis checkpoint -o`, `restore -i` and `migrate`: a checkpoint as one stream."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

import gpustasis
from gpustasis.cli import output
from gpustasis.cli.framework import Command
from gpustasis.cli.options import criu_switches, describe, dump_options, recipients_option
from gpustasis.cli.stream_checks import (
    opening_key,
    require_on_disk,
    require_restorable,
    require_signed,
    require_streamable,
    require_usable,
    seals,
)
from gpustasis.cli.stream_ends import (
    STDIN,
    STDOUT,
    new_file,
    open_missing,
    open_stream,
    standard_output,
    taken_over,
)
from gpustasis.cli.stream_results import describe_sent, dump_of, run_fields, sent_fields
from gpustasis.criu.find import find
from gpustasis.criu.plugin import plugin_directory
from gpustasis.criu.run import Run
from gpustasis.errors import CheckpointError, CriuError
from gpustasis.image.checkpoint import is_sealed
from gpustasis.sealing.keys import KeySource
from gpustasis.streaming.answers import Answers, Replies
from gpustasis.streaming.channel import Descriptor
from gpustasis.streaming.receive import Received, Source, receive
from gpustasis.streaming.send import (
    DEFAULT_RESTORE_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    Target,
    send,
)
from gpustasis.streaming.ssh import Ssh
from gpustasis.text import mib

_LOCKS_LEFT = (
    "it may have left the job's connections locked: look for rules of CRIU in `nft list ruleset` "
    "and `iptables-save`"
)
_PROGRAM = f"gpustasis {gpustasis.__version__}"

Decorated = TypeVar("Decorated", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Place:
    """spool: where a dump, or what is received, is put; None: the usual place. timeout_s: how long
    a stream may stall. restore_timeout_s: how long the other end may restore."""

    spool: Path | None
    timeout_s: float
    restore_timeout_s: float = DEFAULT_RESTORE_TIMEOUT_S


def _timeout_option(function: Decorated) -> Decorated:
    return click.option(
        "--stall-timeout",
        "timeout",
        type=click.FloatRange(1, 86400),
        default=DEFAULT_TIMEOUT_S,
        show_default=True,
        metavar="SECONDS",
        help="A stream that stands still for so long has broken off.",
    )(function)


def _restore_timeout_option(function: Decorated) -> Decorated:
    return click.option(
        "--restore-timeout",
        type=click.FloatRange(1, 7 * 86400),
        default=DEFAULT_RESTORE_TIMEOUT_S,
        show_default=True,
        metavar="SECONDS",
        help="How long the restore at the other end is waited for.",
    )(function)


def _spool_option(function: Decorated) -> Decorated:
    return click.option(
        "--spool",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Where the dump is put while it is sent.  [default: /var/lib/gpustasis/spool]",
    )(function)


def output_options(function: Decorated) -> Decorated:
    """Of checkpoint."""
    one_way = click.option("--one-way", is_flag=True, help="Nobody answers, at a socket either.")
    for option in (one_way, _restore_timeout_option, _timeout_option, _spool_option):
        function = option(function)
    return click.option(
        *("-o", "--output", "output_to"),
        metavar="FILE",
        help="A new file that the checkpoint goes to as a stream; -: standard output.",
    )(function)


def input_options(function: Decorated) -> Decorated:
    """Of restore."""
    two_way = click.option(
        "--two-way/--one-way",
        default=None,
        help="Whether the sender is answered, on the same socket, or else on standard output.  "
        "[default: yes of a socket]",
    )
    may_run = click.option(
        "--source-may-run",
        is_flag=True,
        help="Restore a stream of a job that was left running where it comes from, or one that "
        "does not say that the job has ended there.",
    )
    for option in (may_run, two_way, _timeout_option):
        function = option(function)
    return click.option(
        *("-i", "--input", "input_from"),
        metavar="FILE",
        help="The file with the stream; -: standard input.",
    )(function)


def require_no_option(stream: str, *parameters: str) -> None:
    """Without the option `stream` these say nothing: raise click.UsageError if one is given."""
    context = click.get_current_context()
    for option in context.command.params:
        if option.name in parameters:
            source = context.get_parameter_source(option.name)
            if source is not ParameterSource.DEFAULT:
                names = "/".join([*option.opts, *option.secondary_opts])
                raise click.UsageError(f"{names} belongs to a stream: {stream}")


def checkpoint_to(
    pid: int,
    name: str,
    place: Place,
    one_way: bool,
    leave_running: bool,
    options: dict[str, Any],
) -> None:
    """`gpustasis checkpoint PID -o NAME`."""
    require_streamable(options.get("criu_args", ()))
    with ExitStack() as opened:
        if name == "-":
            target = standard_output(opened, place.timeout_s, one_way)
            target.restore_timeout_s = place.restore_timeout_s
        else:
            target = new_file(opened, Path(name), place.timeout_s)
        if target.answers is not None and leave_running:
            raise click.UsageError(
                "--leave-running: the receiver restores the job, which would run twice; write the "
                "stream to a file"
            )
        sent = send(
            _dumper(pid, options, leave_running),
            pid,
            target,
            leave_running=leave_running,
            is_sealed=seals(options["recipients"]),
            place=place.spool,
        )
    done = dump_of(sent, pid, options)
    ended = "runs on" if leave_running else "has ended"

    def show() -> None:
        output.say(
            f"process {pid} {ended}, and {mib(sent.bytes)} in {sent.files} files went to "
            f"{target.out.place}: {describe_sent(sent)} (criu {done.criu_version}, "
            f"{done.seconds:.2f} s)"
        )
        if sent.spool is not None:
            output.say(
                f"nobody said that they have arrived: the checkpoint is in {sent.spool} too; "
                "remove that once you know"
            )

    fields = {**run_fields(done, sent.spool), "stream": sent_fields(sent, name)}
    output.answer(fields, show)


def restore_from(
    name: str,
    place: Place,
    two_way: bool | None,
    may_run: bool,
    key: KeySource | None,
    options: dict[str, Any],
) -> None:
    """`gpustasis restore -i NAME`."""
    named, key = key is not None, opening_key(key)
    find(options["criu"])  # what is missing or wrong here is said before anything is taken
    plugin_directory(os.environ)
    require_usable(options)
    has_terminal = name != "-" and os.isatty(STDIN)
    with ExitStack() as opened:
        replies = Replies(None, place.timeout_s)
        if name == "-":
            open_missing()
            stream = Descriptor(STDIN, "standard input", writing=False)
            opened.callback(stream.close)
            if stream.is_socket if two_way is None else two_way:
                if not options["detached"]:
                    raise click.UsageError("--foreground: the sender would wait for the job's end")
                if stream.is_socket:
                    back = Descriptor(STDIN, "the sender", writing=True)
                    opened.callback(back.close)
                else:
                    back = taken_over(opened, STDOUT, "the sender")
                replies = Replies(back, place.timeout_s)
        elif two_way:
            raise click.UsageError("--two-way: a file does not listen")
        else:
            stream = open_stream(opened, name)
        source = Source(
            stream=stream,
            replies=replies,
            program=_PROGRAM,
            place=place.spool,
            may_run=may_run,
            timeout_s=place.timeout_s,
            require=partial(require_restorable, options, has_terminal),
            signed=require_signed,
            key=key,
            foreground=not options["detached"],
        )

        def restore(directory: Path) -> Run:
            used = key if named or is_sealed(directory) else None  # one that is named is spoken of
            return gpustasis.restore(directory, key=used, **options)

        received = receive(source, restore)
    _show_received(received, stream.place, options)


def _show_received(received: Received, place: str, options: dict[str, Any]) -> None:
    done = received.run
    state = "runs" if options["detached"] else "has ended"
    if options["leave_stopped"]:
        state = "is stopped"
    where = received.directory if received.kept else None
    fields = {
        **run_fields(done, where),
        "stream": {
            "stream_id": received.stream_id.hex(),
            "files": received.files,
            "bytes": received.bytes,
        },
    }
    output.answer(
        fields,
        lambda: output.say(
            f"process {done.pid} {state}, restored from {place}: {describe(done.statistics)} "
            f"(criu {done.criu_version}, {done.seconds:.2f} s)"
        ),
    )


@click.command(
    "migrate",
    cls=Command,
    context_settings={"allow_interspersed_args": False},
    epilog="Options of migrate stand before PID.",
)
@click.option(
    "--remote-program",
    default="gpustasis",
    show_default=True,
    metavar="PROGRAM",
    help="What is called at HOST.",
)
@_spool_option
@_timeout_option
@_restore_timeout_option
@recipients_option
@dump_options
@criu_switches
@click.argument("pid", type=click.IntRange(2))
@click.argument("host")
@click.argument("remote", nargs=-1, type=click.UNPROCESSED, metavar="[RESTORE-OPTIONS]...")
def migrate(
    pid: int,
    host: str,
    remote: tuple[str, ...],
    remote_program: str,
    spool: Path | None,
    timeout: float,
    restore_timeout: float,
    externalize: str | None,
    criu_program: str | None,
    **options: Any,
) -> None:
    """Move the process tree below PID to HOST: checkpoint it here and restore it there, over ssh.

    What follows HOST are options of `gpustasis restore` there. The tree ends here only when all of
    it is there, checked and on the disk, and is restored there only when all of it has ended here.
    ssh must not need to ask for a password.
    """
    if host.startswith("-"):
        raise click.UsageError(f"{host!r} is no host")
    options["externalize"] = None if externalize is None else externalize == "on"
    options["criu"] = criu_program
    words = [remote_program, "restore", "-i", "-", "--two-way", "--stall-timeout", f"{timeout:g}"]
    with Ssh(host, [*words, *remote]) as ssh, _with_words_of(ssh):
        answers = Answers(ssh.back, timeout)
        try:
            target = Target(
                out=ssh.out,
                answers=answers,
                timeout_s=timeout,
                restore_timeout_s=restore_timeout,
            )
            dump, is_sealed = _dumper(pid, options, False), seals(options["recipients"])
            sent = send(dump, pid, target, is_sealed=is_sealed, place=spool)
        finally:
            answers.close()
    done = dump_of(sent, pid, options)
    assert sent.restored is not None
    restored = sent.restored
    fields = {
        "host": host,
        **run_fields(done, None),
        "stream": sent_fields(sent, host),
    }
    output.answer(
        fields,
        lambda: output.say(
            f"process {pid} has ended here and runs at {host} as process "
            f"{restored.get('pid')}: {describe_sent(sent)}"
        ),
    )


@contextmanager
def _with_words_of(ssh: Ssh) -> Iterator[None]:
    """What ssh and the program there have said belongs to an error."""
    try:
        yield
    except CheckpointError as exc:
        if said := ssh.said():
            exc.args = (f"{exc}\n  {ssh.host}: {said}",)
        raise


def _dumper(
    pid: int, options: dict[str, Any], leave_running: bool
) -> Callable[[Path, Sequence[str]], Run]:
    require_on_disk(options)

    def dump(images: Path, words: Sequence[str]) -> Run:
        extra = [*options.get("criu_args", ()), *words]
        try:
            made = gpustasis.checkpoint(
                pid,
                images,
                whole=True,
                leave_running=leave_running,
                **(options | {"criu_args": extra}),
            )
        except CriuError as exc:
            if "killed by signal" in str(exc) and options["tcp_established"]:
                exc.args = (f"{exc}\n  {_LOCKS_LEFT}",)
            raise
        assert made.dump is not None
        return made.dump

    return dump
