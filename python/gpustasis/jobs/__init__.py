# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of whole jobs: all ranks are in one, or none is and all run on (docs/jobs.md)."""
