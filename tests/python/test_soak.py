# SPDX-License-Identifier: Apache-2.0
"""What counts as passed in the long campaigns."""

from __future__ import annotations

from collections import Counter

from campaigns.tally import Tally
from soak.__main__ import counted


def test_a_campaign_that_has_tried_nothing_has_failed() -> None:
    good, empty = Tally(Counter(trials=3)), Tally()
    found = [tally.failures for _, tally in counted(iter([("a", good), ("b", empty)]))]
    assert found == [[], ["no trial was made"]]
    found = [tally.failures for _, tally in counted(iter([]))]
    assert found == [["no part of it can be run here"]]
