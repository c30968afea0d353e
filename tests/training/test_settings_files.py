"""Settings files that would fill the memory, overflow or wait are one clear message."""

import os

import pytest

from adtp_export.errors import InputError
from adtp_export.training.settings import read_settings

ALIASES = (
    "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)) + "retention: *a39\n"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ALIASES, "holds a YAML alias, \\*a0; write its value in its place"),
        (f"epochs: {'9' * 5000}\n", "cannot be read as YAML"),
        (f"seed: {'9' * 400}\n", "seed: got 9+\\.\\.\\.; accepted is an integer"),
        (f"retention: {'[' * 5000}{']' * 5000}\n", "cannot be read as YAML"),
        (f"retention: {'[' * 70}{']' * 70}\n", "nested deeper than 64"),
        ("seed: 2020-99-99\n", "cannot be read as YAML"),
        (f"retention: [{'1,' * 10**6}]\n", "got 2,000,.* bytes; accepted are at most 65,536"),
        (f"? {'k' * 1000}\n: 1\n", "unknown option 'k+\\.\\.\\."),
        ("[1]\n", "holds list"),
    ],
)
def test_bombs(tmp_path, text, message):
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as raised:
        read_settings(path)
    assert len(str(raised.value)) < 600


def test_yes_and_no_are_text_where_text_is_wanted_and_no_numbers(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("mixed_precision: no\n")
    assert read_settings(path) == {"mixed_precision": "no"}
    path.write_text("batch_size: yes\n")
    with pytest.raises(InputError, match="batch_size: got True; accepted is an integer"):
        read_settings(path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "settings.yaml")
    with pytest.raises(InputError, match="it is a pipe; accepted is a file"):
        read_settings(tmp_path / "settings.yaml")
