from tests.unit.test_configs import plain_shell  # noqa: F401 - a fixture for every test
