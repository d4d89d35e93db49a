"""Turns run folders into tables and pictures.

This package only reads files, so runs can be compared on another machine than the cluster.
"""
