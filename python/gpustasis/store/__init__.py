# SPDX-License-Identifier: Apache-2.0
"""A store: a directory whose subdirectories are the checkpoints of a job, and what to keep of it."""
