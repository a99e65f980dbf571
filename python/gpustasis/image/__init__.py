# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what is in one, whether it is whole, and stores of several."""
