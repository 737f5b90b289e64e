"""What a run must keep to be the training that was asked for; breaking it makes a probe invalid, however fast it was.

Needs no torch, so that the harness can name it before the script has imported anything.
"""


class InvalidProbe(Exception):
    """The run is no training, or not the one that was asked for. `kind` is the rule that it breaks."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
