# SPDX-License-Identifier: Apache-2.0
"""What others write to the store, or put in a directory, decides nothing that root does."""

from __future__ import annotations

import json

import pytest

from gpustasis.errors import JobError
from gpustasis.jobs.dumps import record_of
from gpustasis.jobs.rank import Context
from jobs.test_left import whole
from jobs.test_undoing import KEYS, context, server  # noqa: F401 - fixtures


@pytest.mark.parametrize("which", [0, 2])
def test_no_address_of_a_record_is_a_command_for_nft(
    which: int,
    context: Context,  # noqa: F811
) -> None:
    """`ipaddress` takes any text after a "%"."""
    whole(context)
    value = json.loads(context.store.read(KEYS.record(1, 0)).entries[KEYS.record(1, 0)].value)
    connection = ["::1", 1, "::1", 2]
    value["network"]["connections"] = [connection]
    assert record_of(json.dumps(value), "rank 0").network.connections
    connection[which] = "::1%x }\nflush ruleset\n"
    with pytest.raises(JobError, match="has a scope"):
        record_of(json.dumps(value), "rank 0")
