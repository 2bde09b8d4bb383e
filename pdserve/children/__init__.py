"""Foreign code that may not end, or may eat memory, runs in child processes: compilers of structures.

    router or worker ─exec─► fork server ─fork─► child, child, …
          │                  one thread,         one job after another, within limits of time and memory
          │                  never runs a job
          └──────────── a socket to each child, jobs and answers ────────────┘

A child whose job passes a limit is killed, and the next one is there at once: a fork of a small process that has
imported everything. When the parent dies, the kernel kills the fork server, and with it the children.
"""
