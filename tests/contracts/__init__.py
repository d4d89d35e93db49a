"""This folder is a package because the tests import the table of contract.py from it."""
