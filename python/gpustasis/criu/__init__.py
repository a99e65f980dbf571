# SPDX-License-Identifier: Apache-2.0
"""CRIU: find one, tell it what to do, run it, and say what went wrong."""
