# SPDX-License-Identifier: Apache-2.0
"""Programs around gpustasis that a node does not need: the benchmark, the demo, the GPU check."""
