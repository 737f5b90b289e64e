"""Parts of `gpu_acceptance.py`."""
