"""A cluster on one machine: router and workers as child processes of one supervisor."""
