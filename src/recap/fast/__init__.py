"""This package has fast versions of the readable models, for one GPU; the readable ones define the results."""
