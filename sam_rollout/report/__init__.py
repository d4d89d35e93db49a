"""Turns run folders into tables and pictures."""
