"""What CUDA does otherwise than the CPU, laid over fake CPU tensors."""


class CannotShadowError(Exception):
    """Something that no shadow run can stand for. The message names it and says why; only a probe can tell."""
