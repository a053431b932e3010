"""A study asks people which of two videos is better: its layout, its votes, and what the votes say."""
