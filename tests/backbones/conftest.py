"""This file makes the stand-ins of this folder importable from the folders below it."""
