"""Structures compiled to token masks. One library behind it: docs/decisions/0008-structured-output.md."""
