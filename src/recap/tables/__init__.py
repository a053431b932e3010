"""Tables: recipes of runs, who runs them, where results are kept, and how they are shown."""
