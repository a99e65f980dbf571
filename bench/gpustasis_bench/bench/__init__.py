# SPDX-License-Identifier: Apache-2.0
"""The benchmark: gpustasis beside stock CRIU on GPU memory as real programs have it.

`gpustasis-bench` runs it; docs/performance.md says how it measures.
"""
