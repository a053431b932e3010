"""Keeps: one file per memory policy, and the storage they share."""
