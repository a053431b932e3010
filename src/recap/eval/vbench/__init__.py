"""VBench-Long by VBench's own models: they run in an environment of their own, we cut, check, fuse and average.

Nothing here imports vbench. `inside.py` is the one file that does; the other environment's Python runs it, with a
job as JSON in and the clips' values as JSON out.
"""
