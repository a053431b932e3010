"""This room handles files and video: safe writes, clips, picture sizes, openings, weights and run folders."""
