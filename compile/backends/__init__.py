"""Backends turn an exported step into a program file."""
