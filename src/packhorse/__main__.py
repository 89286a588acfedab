"""`python -m packhorse`, and what torchrun starts with `-m packhorse`."""

from packhorse.cli.main import main

main()
