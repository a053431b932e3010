"""Files and video: safe writing, reading and writing of clips, picture sizes, opening pictures from a file."""
