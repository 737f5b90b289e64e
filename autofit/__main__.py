"""`python -m autofit` and the `autofit` command."""

import sys

from autofit.cli.commands import run


def main() -> None:
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
