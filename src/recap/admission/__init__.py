"""This room decides which tokens of a finished block are worth keeping; rules of one mechanism share a file."""
