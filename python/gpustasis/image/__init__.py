# SPDX-License-Identifier: Apache-2.0
"""GPU images of a checkpoint: what is in them, and whether it is whole."""
