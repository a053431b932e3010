"""VBench-Long, scored by VBench's own models in an environment of their own; we cut, check, fuse and average.

Nothing in this package imports vbench except `inside.py`, which VBench's Python runs as a script: it reads a job as
JSON and writes the value of each clip as JSON.
"""
