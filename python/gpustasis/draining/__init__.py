# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that were dumped into memory: how they come to the disk, and what becomes of the
memory then."""
