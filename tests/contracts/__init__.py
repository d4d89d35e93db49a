"""A package, because the tests import the table from it."""
