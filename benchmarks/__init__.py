"""Measurements that are not part of the package: `python -m benchmarks.NAME --help` from a checkout."""
