"""How the embedded backbone was made: its world, its parts, its judge. Not installed with the wheel."""
