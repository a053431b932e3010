"""This module runs the command line as `python -m recap`."""

from recap.cli.main import main

main()
