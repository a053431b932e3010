"""Evaluation turns finished clips and traces into numbers. It knows no backbone and no memory."""
