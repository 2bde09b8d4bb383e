"""Tool calls in a model's text, found while it comes."""
