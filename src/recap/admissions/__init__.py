"""Admissions beside the paper's own: those of its ablation, and one that answers the limit it states.

They stand outside `novelty/`, which is the paper's method and part of the core.
"""
