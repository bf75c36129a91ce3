"""The version of this program, which `pyproject.toml` repeats."""

VERSION = "0.1.0"
