"""Compiling for TPUs that aren't there, and reading what the compiler wrote."""
