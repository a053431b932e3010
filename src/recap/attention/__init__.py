"""Reads: rotary phases, attention over segments, and what one block may see."""
