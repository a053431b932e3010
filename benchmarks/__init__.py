"""Benchmarks, which are not part of the package: run `python -m benchmarks.NAME --help` in a checkout."""
