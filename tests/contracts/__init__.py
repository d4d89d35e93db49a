"""A package, so that the tests can import the table beside them."""
