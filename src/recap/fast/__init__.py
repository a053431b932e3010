"""Fast versions of the readable models, transformed for one GPU; the readable ones define the results."""
