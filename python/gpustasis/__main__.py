# SPDX-License-Identifier: Apache-2.0
"""`python -m gpustasis`."""

from gpustasis.cli import main

main()
