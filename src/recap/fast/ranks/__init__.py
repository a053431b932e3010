"""Generates one video with several processes: each has some tokens in the linear parts, and some heads in attention."""
