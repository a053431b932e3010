"""reproduction: a recipe drawn through a sweep, scored, and written down beside the paper's numbers."""
