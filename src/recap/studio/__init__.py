"""The studio serves videos that are directed while they play: one page, one program interface, one model.

`engine` owns the model's thread, `live` is a session on it, `store` has the files, `server` the interface.
"""
