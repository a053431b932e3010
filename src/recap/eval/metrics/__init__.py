"""One file per measure: pure functions from pictures, embeddings or trace lines to numbers."""
