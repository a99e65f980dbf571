"""`python -m gpustasis`."""

from gpustasis.cli import main

main()
