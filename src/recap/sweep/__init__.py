"""sweep: many small independent jobs, done once each, whatever is killed on the way."""
