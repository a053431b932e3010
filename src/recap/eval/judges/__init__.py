"""Judges of the embedded world: who is in a picture, in which colour, and where."""
