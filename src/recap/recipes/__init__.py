"""recipes: what to draw for every table and figure of the paper, as run configs, and the prompts for it.

Part of the package, not a folder beside it: `recap reproduce` must find them in an installed wheel.
"""
