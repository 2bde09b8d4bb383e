"""The steps of gpu_check.py and multi_gpu_check.py, each in a process of its own: `python -m scripts.gpu STEP`."""
