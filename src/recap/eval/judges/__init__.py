"""Judges of the embedded world find which actors a picture shows, in which colours, and where."""
