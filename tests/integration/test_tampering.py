# SPDX-License-Identifier: Apache-2.0
"""What was done to a sealed or packed checkpoint is found; the long form, every byte of one, is the
campaign tampering of make soak."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from campaigns import tampering
from campaigns.rig import Rig
from support.recipients import make_recipient

SEED = 20261125


@pytest.mark.parametrize("live", [True, False])
def test_unseal_refuses_what_was_changed(newest_rig: Rig, tmp_path: Path, live: bool) -> None:
    pair = make_recipient(tmp_path, kind="SECP256R1")
    tampering.run_unseal(newest_rig, Random(SEED), pair, 100, live=live).require_clean()


@pytest.mark.parametrize("sealed", [True, False])
def test_a_restore_refuses_what_was_changed(newest_rig: Rig, tmp_path: Path, sealed: bool) -> None:
    pair = make_recipient(tmp_path, kind="SECP256R1")
    tampering.run_restores(
        newest_rig, Random(SEED), pair, 2, sealed=sealed, clear=4
    ).require_clean()
