"""Rollouts replayed on paper: what a setting would bring on machines one does not have.

Reads cost tables, recorded lengths and token traces; needs no engine, no device and no weights.
"""
