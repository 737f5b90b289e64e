"""What is a secret in a text: values of variables whose names say so, what stands beside such a name, tokens by their looks.

What is recorded passes here: a command, a traceback, the end of a script's output where it is told. The logs in a probe's
folder are the script's own words and stay as they are, readable by the user alone. A secret that has neither a telling
name nor a telling form cannot be known.
"""

import json
import re
from collections.abc import Mapping
from urllib.parse import quote, unquote

REDACTED = "[redacted]"
LEAST_LENGTH = 6  # of a variable's value: a shorter one would also be found where it is none

# Names of secrets: a word of its own, so that `--max_tokens` and `--tokenizer` are none.
_NAME = re.compile(
    r"(?:^|[^a-z])(?:\w*secret\w*|\w*passw(?:or)?d|pwd|passphrase|(?:\w*[-_])?token|(?:\w*[-_.])?(?:api|access|private|auth)?[-_]?key"
    r"|credentials?|auth)$",
    re.IGNORECASE,
)
_NO_SECRET = re.compile(
    r"(?:bos|cls|eos|first|image|last|mask|next|pad|sep|special|start|stop|unk)[-_]token$|^(?:OLD)?PWD$"
)
# What is a secret by itself: tokens of hubs and clouds (a capital or a digit tells them from a name), what follows
# `Bearer`, and user and password in an address.
_VALUE = re.compile(
    r"\b(?:hf_(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{8,}"
    r"|(?:sk-|gh[oprsu]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|AIza)(?=[a-z_-]*[A-Z0-9])[A-Za-z0-9_-]{8,})"
    r"|(?<=\bBearer )[A-Za-z0-9._~+/=-]{8,}"
    r"|(?<=://)[^/@\s:]+:[^/@\s]+(?=@)"
)
_FIELD = re.compile(
    r"""(?P<before>(?P<q>["']?)(?P<name>[\w.-]+)(?P=q)\s*[:=]\s*)(?P<v>["'])(?:\\.|(?!(?P=v)).)*(?P=v)"""
)
_IN_ADDRESS = re.compile(r"://[^/@\s:]*:(?P<password>[^/@\s]+)@")


def is_secret_name(name: str) -> bool:
    """Whether a flag, a setting or a variable of this name holds a secret."""
    return _NAME.search(name) is not None and _NO_SECRET.search(name) is None


def redact_text(text: str, environment: Mapping[str, str]) -> str:
    """`text` without the values of secrets in `environment`, and without what looks like a secret by itself.

    A value counts from six characters on, in the ways in which a text may hold it: as it is, quoted in Python, JSON or an
    address, and line by line.
    """
    known = _secrets_of(environment)
    if known:
        text = re.sub("|".join(re.escape(value) for value in known), REDACTED, text)
    return _VALUE.sub(REDACTED, _FIELD.sub(_redact_field, text))


def _secrets_of(environment: Mapping[str, str]) -> list[str]:
    """Secrets to look for, the longest first, so that none is cut by one that it holds."""
    found: set[str] = set()
    for name, value in environment.items():
        values = [match["password"] for match in _IN_ADDRESS.finditer(value)]
        if is_secret_name(name):
            values.append(value)
        for secret in values:
            lines = secret.splitlines()
            forms = (secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], quote(secret, safe=""), unquote(secret))
            found.update(form for form in (*forms, *(line.strip() for line in lines)) if len(form) >= LEAST_LENGTH)
    return sorted(found, key=lambda value: (-len(value), value))


def _redact_field(match: re.Match[str]) -> str:
    """`"hub_token": "X"` and `hub_token='X'`, whatever the secret looks like."""
    name = match["name"]
    if not is_secret_name(name) or _is_plain_key(name):
        return match[0]
    return f"{match['before']}{match['v']}{REDACTED}{match['v']}"


def _is_plain_key(name: str) -> bool:
    """Any `…_key` may be a secret on a command line; in a text, where dictionaries have keys of every kind, few are."""
    stem = re.sub(r"[-_.]?key$", "", name, flags=re.IGNORECASE)
    return stem != name and re.search(r"(?:api|access|private|auth|secret)$", stem, re.IGNORECASE) is None
