"""From run folders to tables and pictures.

Reads files only, so that a comparison can be made far from the cluster the runs were made on.
"""
