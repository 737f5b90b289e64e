"""The shadow meter: what a run would take of a device's memory, found by running it on tensors that own none.

`allocator` simulates PyTorch's caching allocator and `trace` holds what a shadow run recorded, rewrites it for other batch
sizes and replays it; neither needs torch, so that predictions are drawn from stored traces without loading it.
"""
