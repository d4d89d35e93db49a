"""A package, because the tests import helpers from it."""
