"""Novelty and its rivals: which tokens of a finished block are worth keeping, rules of one mechanism in one file."""
