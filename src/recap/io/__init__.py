"""Files and video: safe writing, reading and writing of clips, sizes, openings from a file."""
