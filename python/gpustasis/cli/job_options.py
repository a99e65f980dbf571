# SPDX-License-Identifier: Apache-2.0
"""Where a job's ranks agree: options of the `gpustasis job` commands, and the store they name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from gpustasis.jobs.store import Store

Decorated = TypeVar("Decorated", bound=Callable[..., object])
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
