"""The metrics and records of a run, and the files of its folder."""
