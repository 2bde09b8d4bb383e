"""pdserve: serving large language models with prefill and decode on different workers."""

__version__ = "0.1.0"
