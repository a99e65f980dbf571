# SPDX-License-Identifier: Apache-2.0
"""`gpustasis emulator`: emulated GPUs, for tests and trials."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from gpustasis.cli import output
from gpustasis.cli.framework import Group
from gpustasis.cli.options import Size
from gpustasis.emulator import Emulator, Options, find_directory
from gpustasis.emulator.cdi import DEFAULT_FILE, KIND, specification, write_specification
from gpustasis.errors import EmulatorError
from gpustasis.text import mib

_OPERATIONS = [
    *["any", "init", "get_state", "lock", "checkpoint", "restore", "unlock", "complete"],
]
_ACTIONS = [
    *["error", "hang", "die", "oom", "failed", "fail_after", "delay", "hang_half", "state", "lie"],
    *["twice", "nonsense", "wrong", "close", "race", "end_thread"],
]

Command = TypeVar("Command", bound=Callable[..., Any])


def _parse_rates(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[float, float] | None:
    """Turn 2,7 or 0 into GB/s to the host and back."""
    if value is None:
        return None
    try:
        down, back = map(float, value.split(",")) if "," in value else (float(value),) * 2
    except ValueError:
        raise click.BadParameter(f"{value!r} is not two rates such as 2,7", ctx, param) from None
    if not all(0 <= rate < 1e6 for rate in (down, back)):
        raise click.BadParameter(f"{value!r}: a rate is 0 or more GB/s", ctx, param)
    return down, back


def _machine_options(command: Command) -> Command:
    """Add the options that say what to emulate."""
    for option in reversed(
        [
            click.option("--gpus", type=click.IntRange(0, 16), help="How many GPUs.  [default: 1]"),
            click.option(
                "--memory",
                type=Size(),
                metavar="SIZE",
                help="Memory of each GPU.  [default: 16GiB]",
            ),
            click.option(
                "--uuid",
                multiple=True,
                help="UUID of the first GPU, the second, ...: several times.",
            ),
            click.option(
                "--driver", metavar="VERSION", help="Version of the driver.  [default: 580.95.05]"
            ),
            click.option(
                "--rates",
                metavar="D2H,H2D",
                callback=_parse_rates,
                help="GB/s of each GPU at a checkpoint and at a restore; 0: no limit.  "
                "[default: 2,7]",
            ),
            click.option(
                "--direct-rates",
                metavar="D2H,H2D",
                callback=_parse_rates,
                help="The same for what a caller copies itself with custom storage, from driver "
                "615 on.  [default: 8.9,10.8; 0 with --rates 0]",
            ),
            click.option(
                "--name", help="Name of each GPU's model.  [default: gpustasis emulated GPU]"
            ),
            click.option(
                "--set",
                "settings",
                multiple=True,
                metavar="KEY=VALUE",
                help="A setting, as `emulator status` lists them. Several times.",
            ),
        ]
    ):
        command = option(command)
    return command


def _options(
    gpus: int | None,
    memory: int | None,
    uuid: tuple[str, ...],
    driver: str | None,
    name: str | None,
    settings: tuple[str, ...],
    rates: tuple[float, float] | None,
    direct_rates: tuple[float, float] | None,
) -> Options:
    pairs = dict(setting.partition("=")[::2] for setting in settings)
    return Options(gpus, memory, uuid, driver, name, pairs, rates, direct_rates)


@click.group("emulator", cls=Group)
@click.option(
    "--instance",
    default="default",
    help="Which of several emulators: a name of your choice.  [default: default]",
)
@click.pass_context
def command(ctx: click.Context, instance: str) -> None:
    """Run programs on emulated GPUs.

    For tests and trials: everything is slow, and nothing is real. The environment variable
    GPUSTASIS_EMULATOR (a socket's path) overrides --instance.
    """
    ctx.obj = Emulator(instance=instance)


@command.command()
@_machine_options
@click.pass_obj
def start(emulator: Emulator, /, **options: Any) -> None:
    """Start the emulator; it runs until `stop`."""
    started = emulator.start(_options(**options))
    state = "started" if started else "was already running"
    output.answer(
        {"socket": emulator.path, "started": started},
        lambda: output.say(f"emulator {state} at {emulator.path}"),
    )


@command.command()
@click.pass_obj
def stop(emulator: Emulator) -> None:
    """Stop the emulator; what its GPUs hold is lost."""
    emulator.stop()
    output.answer(
        {"socket": emulator.path}, lambda: output.say(f"emulator at {emulator.path} stopped")
    )


@command.command()
@click.pass_obj
def status(emulator: Emulator) -> None:
    """Say what is emulated and who uses it."""
    found = emulator.status()
    output.answer(found, lambda: _show(found))


def _show(found: dict[str, Any]) -> None:
    output.say(
        f"emulator at {found['socket']}, pid {found['pid']}: driver {found['driver_version']} "
        f"(emulated), API {found['api_version']}"
    )
    for index, gpu in enumerate(found["gpus"]):
        memory = f"{gpu['used_bytes'] / 2**20:.1f} of {mib(gpu['memory_bytes'])}"
        output.say(f"  GPU {index}: {gpu['name']}, {gpu['uuid']}, {memory}")
        for process in gpu["processes"]:
            output.say(
                f"    {process['pid']} {process['name']}: {mib(process['used_bytes'])}, "
                f"device files are {process['device_stand_in']}, "
                f"mappings {process['mapping_stand_in']}"
            )
    for key, value in found["settings"].items():
        output.say(f"  {key} = {value}")
    for fault in found["faults"]:
        output.say(f"  fault {_describe(fault)}")


@command.command()
@click.pass_obj
def env(emulator: Emulator) -> None:
    """Print what to `eval` in a shell that is to use the emulator."""
    variables = emulator.environment(int(emulator.status()["api_version"]))
    include = find_directory() / "include"
    lines = [f"export {key}={shlex.quote(value)}" for key, value in variables.items()]
    lines.append(f"# kernels: -I{include}, see gpustasis_emulator.h there")
    output.answer(
        {"variables": variables, "include_directory": include},
        lambda: output.exact("\n".join(lines)),
    )


@command.command()
@click.option(
    "-o",
    "--output",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"Write it there; engines read {DEFAULT_FILE.parent}.",
)
@click.pass_obj
def cdi(emulator: Emulator, file: Path | None) -> None:
    """Print a CDI specification, for containers with these GPUs.

    An engine that has it takes `--device gpustasis.io/gpu=all`.
    """
    made = specification(emulator)
    text = json.dumps(made, indent=2)
    if file is None:
        output.answer({"specification": made}, lambda: output.exact(text))
        return
    write_specification(text + "\n", file)
    output.answer(
        {"specification": made, "file": file},
        lambda: output.say(f"device {KIND}=all of {emulator.path} written to {file}"),
    )


@command.command(context_settings={"allow_interspersed_args": False})
@_machine_options
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
def run(emulator: Emulator, /, program: tuple[str, ...], **options: Any) -> None:
    """Run PROGRAM with its arguments on the emulator, starting that if it does not run.

    Options for the emulator stand before PROGRAM; what follows it is PROGRAM's.

    The emulator goes on when the program has ended: it may be restored.
    """
    emulator.start(_options(**options))
    environment = emulator.environment(int(emulator.status()["api_version"]))
    try:
        os.execvpe(program[0], program, os.environ | environment)
    except OSError as exc:
        raise EmulatorError(f"cannot run {program[0]}: {exc.strerror}") from exc


@command.command(name="set")
@click.argument("key")
@click.argument("value")
@click.pass_obj
def set_(emulator: Emulator, key: str, value: str) -> None:
    """Change a setting that `status` shows."""
    emulator.set(key, value)
    output.answer({"key": key, "value": value})


@command.group()
def fault() -> None:
    """Make operations go wrong."""


@fault.command()
@click.argument("operation", type=click.Choice(_OPERATIONS))
@click.argument("action", type=click.Choice(_ACTIONS))
@click.option(
    "--code",
    type=int,
    help="CUresult; for die, a signal (default: it exits); for state, the state.",
)
@click.option("--count", type=int, default=1, show_default=True, help="How often; 0: always.")
@click.option("--delay-ms", type=int, default=0, help="Wait before that.")
@click.option("--pid", type=int, default=0, help="Only in this process.")
@click.pass_obj
def add(
    emulator: Emulator,
    /,
    operation: str,
    action: str,
    code: int | None,
    count: int,
    delay_ms: int,
    pid: int,
) -> None:
    """Let OPERATION meet ACTION."""
    number = emulator.add_fault(
        operation, action, code=code, count=count, delay_ms=delay_ms, pid=pid
    )
    output.answer({"number": number}, lambda: output.say(f"emulator fault {number} added"))


@fault.command(name="list")
@click.pass_obj
def list_(emulator: Emulator) -> None:
    """List the faults that are still to come."""
    faults = emulator.status()["faults"]

    def show() -> None:
        for entry in faults:
            output.say(_describe(entry))

    output.answer({"faults": faults}, show)


@fault.command()
@click.pass_obj
def clear(emulator: Emulator) -> None:
    """Forget all faults."""
    emulator.clear_faults()
    output.answer({})


def _describe(fault: dict[str, Any]) -> str:
    times = "always" if fault["count"] == 0 else f"{fault['count']} times"
    who = f"pid {fault['pid']}" if fault["pid"] else "any process"
    return (
        f"{fault['number']}: {fault['operation']} {fault['action']}, code {fault['code']}, "
        f"{times}, after {fault['delay_ms']} ms, {who}"
    )
