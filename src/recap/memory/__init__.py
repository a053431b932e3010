"""This room keeps what was generated: one file per memory policy, and the storage they share."""
