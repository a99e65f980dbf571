# SPDX-License-Identifier: Apache-2.0
"""Copies of checkpoints in the memory of a neighbour: a node that dies costs nothing that was
copied. docs/operating.md, "A copy on a neighbour"."""
