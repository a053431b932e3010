"""Generates one video with several processes: each has some tokens in linear layers, some heads in attention."""
