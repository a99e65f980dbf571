# SPDX-License-Identifier: Apache-2.0
"""The demo: train on a GPU, checkpoint mid-way, kill, restore, compare with a run left alone.

`python -m gpustasis_bench.demo` runs it all and ends with a table and a JSON file.
"""
