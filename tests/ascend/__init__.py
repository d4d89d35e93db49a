"""This folder is a package because the tests import helpers from it."""
