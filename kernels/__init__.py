"""Inkling's operations: one folder an op, each a reference, a native CPU kernel and its cases."""
