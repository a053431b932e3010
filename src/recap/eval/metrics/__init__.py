"""Each file has one measure: pure functions from pictures, embeddings or trace lines to numbers."""
