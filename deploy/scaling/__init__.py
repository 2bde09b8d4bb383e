"""How many workers each pool should have: seen in the routers' status, decided without I/O, done by an actuator."""
