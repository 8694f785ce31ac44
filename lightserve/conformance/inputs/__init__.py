"""Inputs of ops, small, for the conformance suite and the tests."""
