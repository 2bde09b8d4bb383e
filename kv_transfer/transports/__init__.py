"""How frames and KV bytes move: stream sockets, the in-memory network, and a wrapper that makes any of them faulty."""
