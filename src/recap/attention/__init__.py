"""This room reads memory: rotary phases, attention over segments, and what one block may see."""
