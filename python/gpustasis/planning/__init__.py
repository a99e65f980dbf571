# SPDX-License-Identifier: Apache-2.0
"""What checkpoints of a job cost, what they save, and how often to take them.

Nothing here reads a file or asks a machine: figures go in, figures come out. docs/planner.md says
what the model is, and how it was checked.
"""
