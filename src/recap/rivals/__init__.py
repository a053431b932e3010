"""What others keep: one file per published memory, behind the same `MemoryPolicy`, none knowing another."""
