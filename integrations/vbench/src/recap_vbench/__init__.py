"""Adds `recap vbench`: VBench-Long, scored by VBench's own models in an environment of their own.

**It has not met VBench's real weights yet**: what ran is the stand-in of the tests, and VBench's real code for
flickering, and for dynamic degree and the static filter with random weights. We cut, check, fuse and average.

Nothing here imports vbench except `inside.py`, which VBench's Python runs as a script: it reads a job as JSON and
writes the value of each clip as JSON.
"""
