"""`python -m cudackpt`."""

from cudackpt.cli import main

main()
