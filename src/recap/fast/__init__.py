"""fast: finished models transformed for speed; the readable ones stay the meaning."""
