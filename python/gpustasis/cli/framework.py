# SPDX-License-Identifier: Apache-2.0
"""What all commands have in common: --json, errors, exit statuses."""

from __future__ import annotations

import sys
import traceback
from typing import Any, NoReturn

import click

from gpustasis import errors
from gpustasis.cli import output
from gpustasis.cli.output import Ending
from gpustasis.errors import CheckpointError


class Command(click.Command):
    """A command with --json; what it answers, and the error that it ends with, are one document."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["--json"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_want_json,
                help="One JSON object on stdout, errors too.",
            )
        )

    def invoke(self, ctx: click.Context) -> None:
        try:
            super().invoke(ctx)
            output.finish()
            output.flush()
        except click.exceptions.Exit:
            raise
        except BrokenPipeError:
            output.drop()
            raise click.exceptions.Exit(errors.OUTPUT_CLOSED) from None
        except KeyboardInterrupt:
            raise _reported(click.Abort(), ctx) from None
        except Exception as exc:
            _reported(exc, ctx)
            raise


class Group(click.Group):
    """Commands that belong together."""

    command_class = Command
    group_class = type


def _want_json(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        output.want_json(_name(ctx))


def _reported(exc: Exception, ctx: click.Context) -> Exception:
    """`exc`, after it was told in JSON if that is wanted."""
    if isinstance(exc, click.UsageError):
        exc.ctx = exc.ctx or ctx
    if output.fail(_ending(exc)):
        exc.reported_as_json = True  # type: ignore[attr-defined]
    return exc


def _name(ctx: click.Context) -> str:
    """As it is called, without the program: "containerd list"; empty for the program itself."""
    names: list[str] = []
    step = ctx
    while step.parent is not None:
        names.insert(0, step.command.name or "")
        step = step.parent
    is_program = isinstance(step.command, click.Group)
    return " ".join(names) if is_program else step.command.name or ""


def _ending(exc: Exception) -> Ending:
    if isinstance(exc, CheckpointError):
        return Ending(exc.exit_code, type(exc).__name__, str(exc), exc.details())
    if isinstance(exc, click.ClickException):
        return Ending(errors.USAGE, "UsageError", exc.format_message())
    if isinstance(exc, click.Abort):
        return Ending(errors.INTERRUPTED, "Interrupted", "interrupted")
    return Ending(errors.BUG, type(exc).__name__, f"this is a bug in gpustasis: {exc}")


def run(command: click.Command, program: str, called: str = "") -> NoReturn:
    """Run a command line and exit with a status of docs/errors.md. called: what to type for
    `program`, if that is something else."""
    output.prepare_streams()
    try:
        # The status of --help and the like; a command itself returns nothing.
        status = command.main(prog_name=called or program, standalone_mode=False) or errors.DONE
    except Exception as exc:  # noqa: BLE001 - whatever ends a command has a status
        ending = _ending(exc)
        context = exc.ctx if isinstance(exc, click.UsageError) else None
        if context is not None:
            output.warn(context.get_usage())
            output.warn(f"Try '{context.command_path} --help' for help.")
        if ending.status == errors.BUG:
            output.warn("".join(traceback.format_exception(exc)).rstrip("\n"))
        output.warn(f"{program}: {ending.message}")
        if not getattr(exc, "reported_as_json", False) and _asks_for_json(sys.argv[1:]):
            output.fail(ending, "" if context is None else _name(context))
        status = ending.status
    sys.exit(status)


def _asks_for_json(words: list[str]) -> bool:
    return "--json" in (words[: words.index("--")] if "--" in words else words)
