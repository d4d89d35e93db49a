"""This folder is a package because tests import contract.py from it."""
