"""A study as a folder for raters, and as a report of their votes."""
