"""`pdserve bench`: sends a planned load to a cluster, measures each request, and says what it came to."""
