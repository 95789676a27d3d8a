"""`python -m scone` is the `scone` command."""

from scone.cli import main

main()
