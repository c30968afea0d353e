"""The recipes that come along are read, and a wrong one is one clear message."""

import os

import pytest

from adtp_export.calibration import recipes
from adtp_export.errors import InputError

GOOD = 'target = "trt"\nformat = "int8"\nbase = "fp16"\n'


def test_those_that_come_along():
    files = sorted(recipes.DIRECTORY.glob("*.toml"))
    assert [path.stem for path in files] == [
        "linear.int8",
        "ort-cpu.int8",
        "rtx.fp8",
        "rtx.int8",
        "trt.fp8",
        "trt.int8",
    ]
    for path in files:
        recipe = recipes.read(path)
        assert (f"{recipe.target}.{recipe.format}", recipe.name) == (path.stem, path.stem)
        assert recipes.built_in(recipe.target, recipe.format) == recipe


def test_levels():
    int8, fp8 = recipes.built_in("trt", "int8").levels, recipes.built_in("trt", "fp8").levels
    assert len(int8) == 128
    assert len(fp8) == 127  # of 256: the sign apart, and without the two NaNs
    for levels in (int8, fp8):
        assert (levels[0], levels[-1]) == (0, 1)
        assert (levels[1:] > levels[:-1]).all()
    assert 448 * fp8[-2] == 416


def test_excluded_products(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD + 'exclude = ["layers.0.*", "*.ffn.output.dense"]\n')
    recipe = recipes.read(path)
    assert recipe.name == "mine"
    names = ["layers.0.attention.qkv", "layers.3.attention.qkv", "layers.3.ffn.output.dense"]
    assert recipe.quantized(names) == ["layers.3.attention.qkv"]
    with pytest.raises(
        InputError, match=r"recipe mine: exclude has '\*\.ffn\.output\.dense', which matches no matrix product"
    ):
        recipe.quantized(names[:2])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("target = ", "cannot be read as a recipe"),
        (GOOD + f"smooth = {'9' * 5000}\n", "cannot be read as a recipe"),
        (GOOD + f"smooth = {'9' * 400}\n", "smooth is 2.0; accepted are 0 to 1"),
        (GOOD + 'activations = "per-token"\n', 'is for target = "linear", and that takes nothing else'),
        (GOOD.replace("trt", "linear") + 'activations = "per-token"\n', 'is for int8 with base = "fp32"'),
        (GOOD + f"exclude = {'[' * 5000}{']' * 5000}\n", "cannot be read as a recipe"),
        (GOOD + f"exclude = [{'[],' * 10**6}]\n", "got 3,000,.* bytes; accepted are at most 65,536"),
        (GOOD + f"exclude = {'[' * 70}{']' * 70}\n", "nested deeper than 64"),
        (GOOD + f"{'a.' * 20_000}a = 1\n", "line 4 has 20,000 dots; accepted are at most 100"),
        (GOOD + "'\u2028'.a." * 5_000 + "a = 1\n", "dots; accepted are at most 100"),
        (GOOD + f"bias = '{'x' * 10**4}'\n", "x\\.\\.\\.; accepted are float, int32"),
        ('target = "trt"\nformat = "int8"\n', "base is missing"),
        (GOOD + "perchannel = true\n", "got the key 'perchannel'; accepted are .*did you mean 'per_channel'"),
        (GOOD + 'per_channel = "yes"\n', "per_channel is 'yes'; accepted is a value of type bool"),
        (GOOD + "smooth = true\n", "smooth is True; accepted is a value of type float"),
        (GOOD + "smooth = 2\n", "smooth is 2.0; accepted are 0 to 1"),
        (GOOD + 'smooth = 0.5\nobserver = "mse"\n', 'smooth is for activations in 8 bits with observer = "minmax"'),
        (GOOD + 'activations = "none"\nsmooth = 0.5\n', 'smooth is for activations in 8 bits with observer = "minmax"'),
        (GOOD + 'activations = "none"\nresidual = true\n', "residual is for static activations"),
        (GOOD + 'observer = "max"\n', "observer: got 'max'"),
        (GOOD.replace("int8", "int4"), "format is 'int4'; accepted are int8, fp8"),
        (GOOD.replace("int8", "fp8") + "pairs_fit_16_bits = true\n", "pairs_fit_16_bits is for int8"),
        (GOOD + 'activations = "none"\nbias = "int32"\n', "is for int8 with static activations"),
    ],
)
def test_wrong_recipes(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as raised:
        recipes.read(path)
    assert len(str(raised.value)) < 600


def test_a_recipe_is_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(InputError, match="it is a pipe; accepted is a file"):
        recipes.read(tmp_path / "pipe.toml")
    with pytest.raises(InputError, match="it is a directory"):
        recipes.read(tmp_path)


def test_recipes_of_a_run(tmp_path):
    """Of the user where there is one for a target and a format, else those that come along."""
    own = tmp_path / "own.toml"
    own.write_text((recipes.DIRECTORY / "ort-cpu.int8.toml").read_text())
    given, other = recipes.find_recipes(["int8"], ["ort-cpu", "rtx"], [own])
    assert (given.name, other) == ("own", recipes.built_in("rtx", "int8"))
    with pytest.raises(InputError, match="it is int8 for ort-cpu, and this run makes fp8 for rtx"):
        recipes.find_recipes(["fp8"], ["rtx"], [own])
    with pytest.raises(InputError, match="own is int8 for ort-cpu already; give one of them"):
        recipes.find_recipes(["int8"], ["ort-cpu"], [own, own])
