"""python -m pdserve.children CONTROL_FD PARENT_PID: started by `server_process.py`, not by people."""

from __future__ import annotations

import sys

from pdserve.children.fork_server import main

main(int(sys.argv[1]), int(sys.argv[2]))
