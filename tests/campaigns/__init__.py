# SPDX-License-Identifier: Apache-2.0
"""Faults put in the way of real dumps and restores, many of them, chosen by a seed.

Each module is one campaign: `run(rig, random, ...)` returns a Tally. tests/integration runs a few
trials of each, tests/soak many, with a report.
"""
