"""`python -m recap`."""

from recap.cli.main import main

main()
