# SPDX-License-Identifier: Apache-2.0
"""The deadline of a call within a test leaves that of the test alone."""

from __future__ import annotations

import signal
import time

import pytest

from support.deadlines import LateError, run_with_deadline

OUTER_S = 100.0
LATE_S = 1


@pytest.mark.parametrize("late", [False, True])
def test_a_timer_that_runs_goes_on(*, late: bool) -> None:
    earliest = time.monotonic()
    before = signal.setitimer(signal.ITIMER_REAL, OUTER_S)
    latest = time.monotonic()
    try:
        if late:
            with pytest.raises(LateError):
                run_with_deadline(lambda: time.sleep(60), LATE_S)
        else:
            run_with_deadline(lambda: None)
        asked = time.monotonic()
        left = signal.getitimer(signal.ITIMER_REAL)[0]
        told = time.monotonic()
        # This process may have stood still between any two of these calls, or within the first.
        stood = 0.5 + (asked - latest) - (LATE_S if late else 0)
        assert OUTER_S - (told - earliest) - stood < left < OUTER_S - (asked - latest) + stood
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
