"""This folder is a package because tests import helpers from it."""
