"""The live page: one HTML file with its style and script, without anything from elsewhere."""
