"""This package holds the commands, a file each, joined in `main`."""
