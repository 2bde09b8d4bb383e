"""`make demo`: a real model answers three prompts at once through router, prefill and decode worker."""
