# SPDX-License-Identifier: Apache-2.0
"""Options of the `gpustasis job` commands: where ranks agree, the store, and what SIGTERM does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpustasis.cli.options import Size
from gpustasis.jobs.messages import Limits

if TYPE_CHECKING:
    from gpustasis.jobs.store import Store

Decorated = TypeVar("Decorated", bound=Callable[..., object])
_LIMITS = Limits()
_FILE = click.Path(dir_okay=False, path_type=Path)


def store_options(function: Decorated) -> Decorated:
    """--store and what belongs to it; find_store takes them."""
    for option in reversed(
        (
            click.option(
                "--store",
                "places",
                multiple=True,
                required=True,
                envvar="GPUSTASIS_STORE",
                show_envvar=True,
                metavar="URL|SOCKET",
                help="Where the ranks agree: an endpoint of etcd, http:// or https://, several "
                "times for a cluster; or, for a job on one host, the socket of `gpustasis agent "
                "run`, /run/gpustasis/jobs.sock. Endpoints in the variable are separated by "
                "blanks.",
            ),
            click.option(
                "--store-ca",
                envvar="GPUSTASIS_STORE_CA",
                type=_FILE,
                show_envvar=True,
                help="CA certificates (PEM), one of which must have issued etcd's certificate.  "
                "[default: the system's]",
            ),
            click.option(
                "--store-cert",
                envvar="GPUSTASIS_STORE_CERT",
                type=_FILE,
                show_envvar=True,
                help="Client certificate to show to etcd, in PEM.",
            ),
            click.option(
                "--store-key",
                envvar="GPUSTASIS_STORE_KEY",
                type=_FILE,
                show_envvar=True,
                help="Private key of --store-cert, in PEM.",
            ),
            click.option(
                "--store-user",
                envvar="GPUSTASIS_STORE_USER",
                show_envvar=True,
                help="User of etcd to log in as.",
                default="",
            ),
            click.option(
                "--store-password-file",
                envvar="GPUSTASIS_STORE_PASSWORD_FILE",
                type=_FILE,
                show_envvar=True,
                help="File with the password of --store-user.",
            ),
        )
    ):
        function = option(function)
    return function


@contextmanager
def open_store(options: dict[str, Any]) -> Iterator[Store]:
    """The store that store_options have named; they are taken out of `options`. Raises
    StoreError."""
    from gpustasis.jobs.stores import open_named

    places = options.pop("places")
    names = ("store_ca", "store_cert", "store_key", "store_password_file")
    ca, certificate, key, password = (options.pop(name) for name in names)
    user = options.pop("store_user")
    try:
        store = open_named(
            places, ca=ca, certificate=certificate, key=key, user=user, password_file=password
        )
    except ValueError as exc:
        raise click.UsageError(f"--store: {exc}") from exc
    try:
        yield store
    finally:
        store.close()


def preempting_options(function: Decorated) -> Decorated:
    """What SIGTERM does."""
    for option in reversed(
        (
            click.option(
                "--checkpoint-on-sigterm",
                is_flag=True,
                help="Upon SIGTERM to this keeper, checkpoint all ranks and end them, within the "
                "grace period or not at all; then COMMAND gets the signal.",
            ),
            click.option(
                "--grace",
                type=click.FloatRange(0.0),
                default=30.0,
                show_default=True,
                metavar="S",
                help="With --checkpoint-on-sigterm: seconds from SIGTERM to SIGKILL.",
            ),
            click.option(
                "--reserve",
                type=click.FloatRange(0.1),
                default=5.0,
                show_default=True,
                metavar="S",
                help="Seconds of --grace that COMMAND gets to end by itself when there is no "
                "checkpoint.",
            ),
            click.option(
                "--speed",
                type=Size(),
                metavar="SIZE",
                help="Memory that a checkpoint stores in a second, such as 1GiB: tells whether one "
                "can be made within --grace.  [default: as the last one; 200MiB for the first]",
            ),
            click.option(
                "--checkpointed-status",
                type=click.IntRange(0, 255),
                default=0,
                show_default=True,
                metavar="N",
                help="Exit status once a checkpoint has ended COMMAND.",
            ),
        )
    ):
        function = option(function)
    return function


commit_option = click.option(
    "--commit-at",
    type=click.Choice(["durable", "peer"]),
    default="durable",
    show_default=True,
    help="Commit a checkpoint when the rank's dump is on the disk; or when it is in memory here, "
    "and copied to the neighbour that the configuration of `gpustasis peer` names: it is drained "
    "to the disk afterwards.",
)


def _seconds(name: str, default: float, text: str) -> Callable[[Decorated], Decorated]:
    return click.option(
        name,
        type=click.FloatRange(min=0.1),
        default=default,
        show_default=True,
        metavar="S",
        help=text,
    )


def limit_options(function: Decorated) -> Decorated:
    """How long each step of an epoch may take."""
    ttl = click.option(
        "--ttl",
        type=click.IntRange(2),
        default=10,
        show_default=True,
        metavar="S",
        help="Seconds without a word from a rank's keeper after which the others take it for gone.",
    )
    limits = (
        (
            "--away",
            8.0,
            "without the store after which a rank that may leave an epoch does, and runs on.",
        ),
        (
            "--look-limit",
            _LIMITS.look_s,
            "for all ranks to join an epoch, and to look whether they can be checkpointed.",
        ),
        ("--safe-point-limit", 60.0, "for COMMAND to reach one, with --safe-points."),
        ("--cuda-limit", _LIMITS.lock_cuda_s, "to lock CUDA in all ranks."),
        ("--network-limit", _LIMITS.lock_network_s, "to lock the network of all ranks."),
        ("--dump-limit", _LIMITS.dump_s, "for all dumps, or restores, until the epoch is decided."),
    )
    for name, default, text in reversed(limits):
        function = _seconds(name, default, f"Seconds {text}")(function)
    return ttl(function)
