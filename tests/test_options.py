"""One dataclass makes a parser, a signature, a docstring and checks."""

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from adtp_export.cli.parsing import parser_of, read
from adtp_export.errors import InputError, needs_extras
from adtp_export.options import COUNT, SHARE, Options, PathLike, Range, about, listed, option, takes


@dataclass(frozen=True, kw_only=True)
class Baking(Options):
    """Options of `bake`."""

    dough: PathLike = field(kw_only=False, metadata=about("what is baked", metavar="DOUGH"))
    oven: PathLike | None = field(default=None, kw_only=False, metadata=about("where", flag="--oven"))
    loaves: int = option(2, "how many", "heat", within=COUNT)
    share: float = option(0.5, "that is 100% rye", "heat", within=SHARE)
    crust: str | None = option(None, "of the bread", choices=("thin", "thick"))
    seeds: str | Sequence[str] = option(("rye", "oat"), "on top")
    notes: Sequence[PathLike] = option((), "read before", flag="--note")
    salted: bool = option(False, "with salt")
    secret: object = None

    def check(self) -> None:
        if self.salted and self.crust == "thin":
            raise InputError("--salted goes with a thick crust")


@takes(Baking)
def bake(baking):
    """Bake."""
    return baking


def parser():
    return parser_of(Baking, prog="bake", description="Bake.", json="the bread")


def test_a_command_line_becomes_keywords_of_their_types():
    words = "d.txt --oven o --loaves 3 --note a --note b --seeds rye,oat --salted --json"
    as_json, typed = read(parser(), words.split())
    assert as_json
    assert typed == {
        "dough": Path("d.txt"),
        "oven": Path("o"),
        "loaves": 3,
        "notes": [Path("a"), Path("b")],
        "seeds": "rye,oat",
        "salted": True,
    }
    assert bake(**typed).loaves == 3
    assert read(parser(), ["d"]) == (False, {"dough": Path("d")})


def test_a_positional_that_is_not_typed_is_left_out():
    @dataclass(frozen=True, kw_only=True)
    class Eating(Options):
        bread: PathLike | None = field(default=None, kw_only=False, metadata=about("what is eaten", metavar="BREAD"))

    eat = parser_of(Eating, prog="eat", description="Eat.", json="nothing")
    assert read(eat, []) == (False, {})
    assert read(eat, ["b"]) == (False, {"bread": Path("b")})


def test_help_has_groups_choices_and_defaults():
    shown = " ".join(parser().format_help().split())
    assert "heat: --loaves N how many (default: 2) --share X that is 100% rye (default: 0.5)" in shown
    assert "--crust {thin,thick} of the bread --seeds TEXT on top (default: rye,oat)" in shown
    assert "--salted with salt --json print the bread on stdout" in shown
    assert "secret" not in shown


def test_the_function_shows_the_fields():
    shown = inspect.signature(bake).parameters
    assert [*shown] == ["dough", "oven", "loaves", "share", "crust", "seeds", "notes", "salted", "secret"]
    assert shown["oven"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert (shown["loaves"].kind, shown["loaves"].default) == (inspect.Parameter.KEYWORD_ONLY, 2)
    assert bake.__doc__.startswith("Bake.\n\nOptions:\n    dough: what is baked\n    oven: where\n    loaves: how many")
    assert bake("d", "o").oven == "o"
    with pytest.raises(TypeError, match="missing a required argument: 'dough'"):
        bake()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loaves": 0}, "--loaves: got 0; accepted is at least 1"),
        ({"loaves": 2.5}, "--loaves: got 2.5; accepted is at least 1"),
        ({"loaves": True}, "--loaves: got True; accepted is at least 1"),
        ({"loaves": None}, "--loaves: got nothing; its default is 2"),
        ({"share": "half"}, "--share: got 'half'; accepted is from 0 to 1"),
        ({"share": float("nan")}, "--share: got nan; accepted is from 0 to 1"),
        ({"crust": "thik"}, "--crust: got 'thik'; accepted are thin, thick; did you mean 'thick'?"),
        ({"salted": "no"}, "--salted: got 'no'; accepted are True and False"),
        ({"salted": True, "crust": "thin"}, "--salted goes with a thick crust"),
        ({"oven": 3}, "--oven: got 3 (int); accepted is text or a path"),
        ({"seeds": 3}, "--seeds: got 3 (int); accepted is text or a list"),
        ({"notes": "one"}, "--note: got 'one' (str); accepted is a list"),
        ({"loafs": 3}, "bake: got the unknown option 'loafs'; did you mean 'loaves'?; accepted are dough, oven"),
    ],
)
def test_what_is_not_accepted_is_named(given, message):
    with pytest.raises(InputError) as caught:
        bake("d", **given)
    assert str(caught.value).startswith(message)


@dataclass(frozen=True, kw_only=True)
class Slicing(Options):
    slices: int | None = option(None, "of a loaf")
    width: float | None = option(None, "of a slice")


def test_numbers_are_numpys_as_well_and_no_truth_values():
    for given in ({"slices": np.int64(3)}, {"width": np.float32(0.5)}, {"width": 2}):
        Slicing(**given)
    for given, accepted in (
        ({"slices": 3.0}, "an integer"),
        ({"slices": True}, "an integer"),
        ({"width": "1"}, "a number"),
    ):
        with pytest.raises(InputError, match=rf"\); accepted is {accepted}$"):
            Slicing(**given)


def test_a_second_dataclass_is_passed_on_as_it_was_given():
    @dataclass(frozen=True, kw_only=True)
    class Serving(Options):
        plates: int = option(4, "of guests", within=Range(1, 8, "from 1 to 8"))

    @takes(Baking, rest=Serving)
    def serve(baking, **serving):
        """Serve."""
        return baking.loaves, serving

    assert serve("d", loaves=5) == (5, {})
    assert serve("d", plates="many") == (2, {"plates": "many"})
    assert [*inspect.signature(serve).parameters][-1] == "plates"
    assert "    plates: of guests (default: 4)" in serve.__doc__


def test_lists_are_given_in_two_ways():
    assert listed("a, b") == listed(["a", "b"]) == ("a", "b")
    assert listed(None) == listed([]) == ()


def test_a_module_of_no_extra_is_missing_as_python_says_it():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), needs_extras("this"):
        importlib.import_module("no_such_module")
