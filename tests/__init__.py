"""The tests, as a package: they import what they share from tests.support."""
