"""Fast twins: finished models transformed for one GPU, which the readable ones hold to the same results."""
