"""A cluster on Ray: detached actors that start the same processes as `pdserve up`, and one that keeps them."""
