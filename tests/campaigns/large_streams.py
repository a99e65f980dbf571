# SPDX-License-Identifier: Apache-2.0
"""Streams of large jobs: neither end takes more memory for them."""

from __future__ import annotations

from campaigns import streams
from campaigns.rig import Rig
from campaigns.stream_faults import Fault
from campaigns.stream_memory import Watch
from campaigns.tally import Tally
from support.certificates import Pair
from support.elsewhere import Elsewhere

MOST_MIB = 512  # of all processes of one end together
SHORT_MIB = 768  # of a job in a test that is short: more than an end may hold
_EACH_MIB = 256  # of a process, whose steps are short then
_WAIT_S = 900.0
_OPTIONS = ("--cpu-memory", "ours", "--stall-timeout", "120")


def run(rig: Rig, elsewhere: Elsewhere, mib: int, pair: Pair | None = None) -> Tally:
    """One job whose memory is that large and does not compress, to another machine. pair: whom the
    stream is sealed for; None: nobody."""
    tally = Tally()
    # A process holds what it compares its memory with, too.
    shape = {"cuda": 0, "mib": _EACH_MIB // 2, "plain_children": mib // _EACH_MIB - 1}
    with Watch() as watch:
        found = streams.send(
            rig, elsewhere, Fault(), _OPTIONS, pair=pair, watch=watch, wait_s=_WAIT_S, **shape
        )
    streams.judge(rig, elsewhere, Fault(), found, tally)
    ends = {"sender": watch.sender, "receiver": watch.receiver}
    for name, end in ends.items():
        peak_mib = end.peak_kib >> 10
        tally.counts[f"{name}: MiB at most"] = peak_mib
        if not {"criu", "ld-linux-x86-64"} & end.names or not 0 < peak_mib <= MOST_MIB:
            tally.failures.append(
                f"{name} of {found.forward >> 20} MiB: {peak_mib} MiB, {sorted(end.names)}"
            )
    tally.counts["MiB sent"] = found.forward >> 20
    if tally.counts["runs there"] != 1:
        tally.failures.append(found.said)
    return tally
