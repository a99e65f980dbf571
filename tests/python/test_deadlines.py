# SPDX-License-Identifier: Apache-2.0
"""The deadline of a call within a test leaves that of the test alone."""

from __future__ import annotations

import signal
import time

import pytest

from support.deadlines import LateError, run_with_deadline

OUTER_S = 100.0


@pytest.mark.parametrize("late", [False, True])
def test_a_timer_that_runs_goes_on(*, late: bool) -> None:
    before = signal.setitimer(signal.ITIMER_REAL, OUTER_S)
    begun = time.monotonic()
    try:
        if late:
            with pytest.raises(LateError):
                run_with_deadline(lambda: time.sleep(10), 1)
        else:
            run_with_deadline(lambda: None)
        left = signal.getitimer(signal.ITIMER_REAL)[0]
        assert left == pytest.approx(OUTER_S - (time.monotonic() - begun), abs=0.5)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
