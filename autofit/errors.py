"""What autofit raises when the user has to act.

    AutofitError            one clear line with the way out; the command line prints it and exits with `exit_code`
    ├── UsageError          an option, name, value or file that cannot be used as given              exit 2
    ├── WorkloadError       the user's script or model fails before or during training               exit 3
    ├── NothingFitsError    every candidate was measured or ruled out and none fits the budget       exit 4
    ├── RunDirectoryError   a run directory that is damaged, newer than this version, or in use      exit 5
    ├── DeviceError         the device is busy, missing, or not one that can be measured             exit 6
    └── Interrupted         Ctrl-C or SIGTERM; carries what was found so far                       exit 130

A failed probe is data (`records.Outcome`) and is never raised. Anything else that escapes is a bug of autofit and keeps
its traceback.
"""


class AutofitError(Exception):
    """Base of everything the user can mend. `str(error)` is the whole message: the fact, the value, the way out."""

    exit_code = 1


class UsageError(AutofitError):
    exit_code = 2


class WorkloadError(AutofitError):
    """The workload failed on its own. `log` is the excerpt of its output that explains it, empty when there is none."""

    exit_code = 3

    def __init__(self, message: str, log: str = ""):
        super().__init__(message)
        self.log = log


class NothingFitsError(AutofitError):
    exit_code = 4


class RunDirectoryError(AutofitError):
    exit_code = 5


class DeviceError(AutofitError):
    exit_code = 6


class Interrupted(AutofitError):
    exit_code = 130
