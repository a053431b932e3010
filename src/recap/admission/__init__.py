"""Novelty and its rivals: which tokens of a finished block are worth keeping, one file per rule."""
