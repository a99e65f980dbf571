# SPDX-License-Identifier: Apache-2.0
"""What is put into GPU memory: computed by a program of its own, with the standard library and
PyTorch.

`python3 -m gpustasis_bench.contents` imports nothing else: it runs in a Debian root that has
PyTorch.
"""
