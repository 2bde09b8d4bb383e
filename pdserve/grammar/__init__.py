"""Structures compiled to token masks. One library behind it: docs/decisions/0005-structured-output.md."""
