"""Commands: a file each, joined in `main`."""
