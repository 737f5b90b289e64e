"""What CUDA does otherwise than the CPU, laid over fake CPU tensors."""
