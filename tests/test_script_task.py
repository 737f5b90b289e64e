"""Secrets do not leave in a command, an environment or a text; what is none stays, to the letter."""

import json
from urllib.parse import quote

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from autofit.records import ScriptTask, Task
from autofit.workloads.redaction import REDACTED, is_secret_name, redact_text
from autofit.workloads.script_task import command_line, redact

SECRETS = st.text(st.characters(codec="utf-8", exclude_characters="[]"), min_size=6, max_size=40).filter(
    lambda s: s not in REDACTED and len(s.strip()) >= 6
)
NAMES = st.sampled_from(
    [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "OPENAI_API_KEY",
        "PGPASSWORD",
        "MYSQL_PWD",
        "MY_CREDENTIALS",
    ]
)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="[]"), max_size=60)


@given(NAMES, SECRETS, TEXTS, TEXTS)
def test_no_value_of_a_secret_variable_stays_in_a_text(name, secret, before, after):
    text = redact_text(f"{before}{secret}{after}", {name: secret})
    assert secret not in text
    assert REDACTED in text


@given(NAMES, SECRETS)
def test_nor_as_a_traceback_a_json_file_or_an_address_hold_it(name, secret):
    # A backslash or a quote alone may be spelled otherwise in each, so that only what is said of them is compared.
    for spelled in (repr(secret)[1:-1], json.dumps(secret)[1:-1], quote(secret, safe="")):
        assert spelled not in redact_text(f"ValueError: <{spelled}>", {name: secret})


@given(st.dictionaries(st.text(min_size=1).filter(lambda n: not is_secret_name(n)), TEXTS), TEXTS)
@example({"PWD": "/project", "PATH": "/usr/bin:/bin"}, "File /project/train.py in /usr/bin")
def test_what_is_no_secret_stays_to_the_letter(environment, text):
    plain = redact_text(text, {})
    assume("://" not in "".join(environment.values()))
    assert redact_text(text, environment) == plain


@given(st.text(st.characters(categories=["L", "Zs"], codec="ascii")))
def test_words_are_no_secrets(text):
    assert redact_text(text, {}) == text


def test_a_value_inside_another_one_is_cut_from_it_by_none():
    environment = {"A_TOKEN": "abcdefgh", "B_TOKEN": "abcdefghijkl"}
    assert redact_text("abcdefghijkl abcdefgh", environment) == f"{REDACTED} {REDACTED}"


def test_a_short_value_is_left_since_it_is_found_everywhere():
    assert redact_text("step 1 of 10", {"MY_TOKEN": "1"}) == "step 1 of 10"


def test_the_password_of_an_address_goes_wherever_it_stands():
    environment = {"DATABASE_URL": "postgres://me:pa%40ssword@host/db"}
    for text in ("pa%40ssword was refused", "postgres://me:pa%40ssword@host/db"):
        assert "ssword" not in redact_text(text, environment)


def test_a_key_of_several_lines_goes_line_by_line():
    key = "-----BEGIN KEY-----\nMIIabcdef\nMIIghijkl\n-----END KEY-----"
    assert "MII" not in redact_text(f"  {key.splitlines()[1]}\n  {key.splitlines()[2]}", {"SIGNING_PRIVATE_KEY": key})


@pytest.mark.parametrize(
    "text",
    [
        "login(token='abc')",
        'args = {"hub_token": "abc", "lr": 1}',
        "{'wandb_api_key': 'abc'}",
        'password = "abc"',
        "Authorization: Bearer abcdefgh12",
        "https://user:abc@host",
        "token hf_abcAbcabcabc123 refused",
        "key sk-proj-abcABC123",
    ],
)
def test_what_looks_like_a_secret_goes_by_itself(text):
    assert "abc" not in redact_text(text, {})


@pytest.mark.parametrize(
    "text",
    [
        "from huggingface_hub import hf_hub_download, hf_transformers",
        "import sk-learn-pipelines-of-somebody",
        "tokenizer(pad_token='[PAD]', text_key='sentence')",
        "max_tokens=12, tokenizer='t5', key=lambda row: row['label']",
        'File "/project/train.py", line 3, in <module>',
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "https://huggingface.co/docs:latest",
    ],
)
def test_what_a_traceback_is_full_of_stays(text):
    assert redact_text(text, {"PWD": "/project", "OLDPWD": "/project/train.py", "HOME": "/root"}) == text


@given(st.lists(st.text(st.characters(categories=["Ll"]), min_size=1, max_size=8), max_size=5), NAMES, SECRETS)
def test_a_task_is_written_without_the_secrets_of_its_environment_and_its_launcher(words, name, secret):
    launcher = ("env", f"{name}={secret}", "accelerate", "launch", "--aws_secret_access_key", secret)
    assume(not any(secret in word for word in ("env", "accelerate", "launch", "--aws_secret_access_key", name, *words)))
    task = Task(script=ScriptTask(("train.py", *words), "/", (), "", launcher, {name: secret, "A": "1"}))
    script = redact(task).script
    assert script.command == task.script.command
    assert script.environment == {name: REDACTED, "A": "1"}
    assert script.launcher[0] == "env" and not any(secret in word for word in script.launcher)


def test_a_command_is_told_with_its_blanks_quoted_and_otherwise_as_it_was_typed():
    script = ScriptTask(
        ("train.py", "--name", "two words", "", "--x={a}*"), "/", launcher=("A=b c", "accelerate", "launch")
    )
    assert command_line(script) == "'A=b c' accelerate launch train.py --name 'two words' '' --x={a}*"
