"""A package, so that the tests can import the helpers beside them."""
