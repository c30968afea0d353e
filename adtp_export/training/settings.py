"""Every knob of a training run, in one dataclass: the command's options, the YAML file's keys and the record share it."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from ..contract import HEAD_EMBEDDING, HEAD_SEQUENCE, HEAD_SPANS, HEAD_TOKENS
from ..errors import InputError, did_you_mean, ellipsize, flag_name, quoted
from ..io import check_nesting, read_document
from .method_table import METHODS

CANDIDATE_LISTS = {
    "5": [0.2, 0.4, 0.6, 0.8, 1.0],
    "10": [round(0.1 * i, 3) for i in range(1, 11)],
    "20": [round(0.05 * i, 3) for i in range(1, 21)],
}
RATIOS = ("adaptive", "static")
INTEGRATED_GRADIENTS, GRADIENT_DIFFERENCE = "integrated-gradients", "gradient-difference"
ATTRIBUTIONS = (INTEGRATED_GRADIENTS, GRADIENT_DIFFERENCE)
RETENTION, FLOPS = "0.3", 0.5
"""What is asked for where neither is given: the first by adtp and random, the second by all other methods."""
AUTO = "auto"
HEAD_OF_TASK = {
    "classification": HEAD_SEQUENCE,
    "regression": HEAD_SEQUENCE,
    "tags": HEAD_TOKENS,
    "spans": HEAD_SPANS,
    "embedding": HEAD_EMBEDDING,
}
TASKS = (AUTO, *HEAD_OF_TASK)

ANY = (-math.inf, math.inf)
SHARE, POSITIVE, NOT_NEGATIVE, COUNT = (0.0, 1.0), (1e-12, 1e38), (0.0, 1e38), (1, 2**31)


def _say(default: Any, text: str, group: str, inside: tuple[float, float] = ANY) -> Any:
    return field(default=default, metadata={"help": text, "group": group, "inside": inside})


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How to train. Field names are option names with ``_`` for ``-``.

    Raises:
        InputError: a value out of range; the message names the option.
    """

    data: str | None = _say(None, "data set by name, NAME or NAME/CONFIG as `datasets` knows it: glue/sst2", "data")
    train: str | None = _say(
        None, "instead of --data: a local file with labels (.tsv, .csv, .jsonl or SQuAD's .json, each also .gz)", "data"
    )
    dev: str | None = _say(
        None, "file to choose the best checkpoint on (default: a share of the training rows)", "data"
    )
    test: str | None = _say(None, "file to judge the result on (default: the dev rows, and the record says so)", "data")
    text_column: str | None = _say(
        None, "column with the text; two with a comma for pairs (default: usual names)", "data"
    )
    label_column: str = _say("label", "column with the label", "data")
    task: str = _say(
        "auto",
        "classification, regression, tags, spans, embedding, or auto: columns tokens and tags are for tags; question, context and "
        "answers for spans; labels with a fraction for regression",
        "data",
    )
    dev_share: float = _say(0.05, "share of the training rows held out where there is no dev split", "data", SHARE)
    train_rows: int | None = _say(None, "train on that many rows, drawn by seed 0", "data", COUNT)
    max_tokens: int | None = _say(
        None, "longer texts are cut there; the padded baseline has this length (default: 128, or what the model takes)", "data",
        (4, 2**31),
    )  # fmt: skip
    stride: int | None = _say(
        None, "tokens that windows of a long context share, for spans (default: a quarter of --max-tokens)", "data",
        (0, 2**31),
    )  # fmt: skip
    max_answer_tokens: int = _say(30, "tokens of an answer, at most, for spans", "data", COUNT)

    base: str | None = _say(
        None, "pretrained encoder to start from: a folder, or a name on the Hugging Face hub", "models"
    )
    teacher: str | None = _say(
        None, "instead of --base: a model that knows the task; for vectors a sentence-transformers directory", "models"
    )
    layers: int | None = _say(None, "layers of the student, spread over the teacher's (default: all)", "models", COUNT)

    method: str = _say("adtp", f"how tokens are chosen, and how that is trained: {', '.join(METHODS)}", "retainer")
    prune_sites: str | None = _say(
        None,
        "where to cut, with commas: i.attention, i.ffn (default: 0.ffn; ltp, schedule: all i.ffn; top: i.attention from 1 on; "
        "transkimmer: all i.attention)",
        "retainer",
    )
    retention_ratios: str = _say(
        "20", "candidates: 5, 10 or 20, evenly spaced, or a list such as 0.1,0.3,1.0", "retainer"
    )
    saliency_hidden_size: int = _say(96, "width of the saliency predictor", "retainer", COUNT)
    min_tokens: int = _say(1, "floor of kept tokens", "retainer", COUNT)
    ratio: str = _say("adaptive", "of adtp: adaptive, or static: one ratio for all texts", "retainer")
    retention: str | None = _say(
        None,
        "adtp, random, schedule: share of live tokens to keep at a site, mean over dev; one value, or one per site with commas "
        f"(default: {RETENTION}; schedule: what --flops {FLOPS} leaves)",
        "retainer",
    )
    flops: float | None = _say(
        None,
        "instead of --retention, with any method: share of the encoder's FLOPs to be left, of those without cuts or padding, over dev "
        f"(default: {FLOPS} for ltp, schedule, top, transkimmer, unless --retention is given)",
        "retainer",
        (1e-3, 1.0),
    )
    guided: float = _say(0.1, "share of the steps in which the teacher's attribution makes the cuts", "retainer", SHARE)

    alpha: float = _say(0.5, "weight of L_logit; 1 - alpha is the weight of cross-entropy", "loss", SHARE)
    beta: float = _say(0.1, "weight of L_IG", "loss", NOT_NEGATIVE)
    gamma: float = _say(0.2, "weight of L_ARP + L_TSP; with top of L_rank", "loss", NOT_NEGATIVE)
    kappa: float = _say(0.5, "share of the student's own attribution in the supervision at the end", "loss", SHARE)
    temperature: float = _say(2.0, "temperature of L_logit", "loss", POSITIVE)
    attribution: str = _say(
        INTEGRATED_GRADIENTS,
        "what tokens are kept for: integrated-gradients; or gradient-difference, the teacher's gradient norms minus the student's (LeaF)",
        "loss",
    )
    ig_steps: int = _say(1, "steps m of integrated gradients", "loss", COUNT)
    teacher_dimensions: float = _say(0.9, "share of dimensions that the teacher's attribution keeps", "loss", SHARE)
    without: str = _say(
        "", "ablation: leave out, with commas: ce, logit, ig, arp, tsp, teacher; with top: rank", "loss"
    )

    teacher_epochs: float = _say(1.0, "epochs of fine-tuning the base", "schedule", POSITIVE)
    epochs: float = _say(3.0, "epochs of the student", "schedule", POSITIVE)
    teacher_learning_rate: float = _say(8e-5, "peak rate of the teacher", "schedule", POSITIVE)
    learning_rate: float = _say(8e-5, "peak rate of the student's encoder", "schedule", POSITIVE)
    retainer_learning_rate: float = _say(1e-3, "peak rate of the retainers, which start anew", "schedule", POSITIVE)
    weight_decay: float = _say(0.01, "weight decay of AdamW", "schedule", NOT_NEGATIVE)
    warmup: float = _say(0.06, "share of the steps in which the rate rises", "schedule", SHARE)
    batch_size: int = _say(32, "rows per step and device", "schedule", COUNT)
    evaluations: int = _say(
        4, "evaluations on dev, evenly over a stage; the best checkpoint is kept", "schedule", COUNT
    )
    seed: int = _say(0, "seed of initialisation, order and dropout", "schedule", (0, 2**31))

    def __post_init__(self) -> None:
        for known in dataclasses.fields(self):
            value, (low, high) = getattr(self, known.name), known.metadata["inside"]
            if value is None and known.default is not None:
                raise InputError(f"{flag_name(known.name)}: got nothing; its default is {known.default!r}")
            if isinstance(value, (int, float)) and not low <= value <= high:
                raise InputError(f"{flag_name(known.name)}: got {value}; accepted is {_range(low, high)}")
        if self.ratio == "random":
            raise InputError("--ratio: got 'random'; that is a method of its own now: give --method random instead")
        choosing = (("ratio", RATIOS), ("task", TASKS), ("method", tuple(METHODS)), ("attribution", ATTRIBUTIONS))
        for name, choices in choosing:
            if (value := getattr(self, name)) not in choices:
                hint = did_you_mean(value, choices)
                raise InputError(f"--{name}: got {quoted(value)}; accepted are {', '.join(choices)}{hint}")
        self._check_method()
        self._check_terms()
        given = self._list("retention")
        if not all(0 < value <= 1 for value in given):
            raise InputError(f"--retention: got {quoted(self.retention)}; accepted is above 0, up to 1")
        default = METHODS[self.method].sites
        settled = self.prune_sites is not None or default(1) == default(2)  # else a task knows the number of layers
        if settled and len(given) not in (1, len(self.sites)):
            raise InputError(
                f"--retention: got {quoted(self.retention)} for {len(self.sites)} sites; give one value, or one per site"
            )
        from ..model.pruners.adtp import ratios_in_permille  # brings in torch, which --help does without

        ratios_in_permille(self.candidates)

    def _check_method(self) -> None:
        """Raises InputError for a setting that other methods have, and this one has not."""
        for known in dataclasses.fields(self):
            users = [name for name, facts in METHODS.items() if known.name in facts.settings]
            if users and self.method not in users and getattr(self, known.name) != known.default:
                instead = "give --flops, or leave it out" if known.name == "retention" else "leave it out"
                raise InputError(
                    f"{flag_name(known.name)}: got {quoted(getattr(self, known.name))}; --method {self.method} has no such setting, "
                    f"and {', '.join(users)} have: {instead}"
                )

    def _check_terms(self) -> None:
        """Raises InputError where an unknown term is left out, or all are."""
        terms = METHODS[self.method].terms
        for term in self.left_out:
            if term not in (*terms, "teacher"):
                hint = did_you_mean(term, terms)
                raise InputError(f"--ablate: got {quoted(term)}; accepted are {', '.join(terms)} and teacher{hint}")
        if self.attribution == GRADIENT_DIFFERENCE and "teacher" in self.left_out:
            raise InputError(
                f"--attribution {GRADIENT_DIFFERENCE} compares with a teacher, and --ablate teacher has none; leave one of them out"
            )
        if self.method == "top" and not (self.weights["ce"] or self.weights["logit"]):
            raise InputError("--method top ends without its own term; leave ce or logit in, with a weight above 0")
        if not any(self.weights.values()):
            raise InputError(
                "the loss has no term left; leave fewer out with --ablate, or give one of them a weight above 0"
            )

    @property
    def adaptive(self) -> bool:
        """Whether the pruners choose between ratios."""
        return self.method == "adtp" and self.ratio == "adaptive"

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the terms of the loss; 0 where a switch leaves one out, or the method does not have it."""
        weights = {
            "ce": 1 - self.alpha,
            "logit": self.alpha,
            "ig": self.beta,
            "arp": self.gamma if self.sites and self.adaptive else 0.0,
            "tsp": self.gamma if self.sites else 0.0,
            "rank": self.gamma,
        }
        terms = METHODS[self.method].terms
        of_teacher = ("logit", "ig", "rank") if "teacher" in self.left_out else ()
        off = {*self.left_out, *of_teacher, *(set(weights) - set(terms))}
        weights = {name: 0.0 if name in off else weight for name, weight in weights.items()}
        if "rank" not in terms:
            del weights["rank"]
        return weights

    def _list(self, name: str) -> list[float]:
        value = RETENTION if (value := getattr(self, name)) is None else value
        try:
            return [float(part) for part in value.split(",")]
        except ValueError:
            raise InputError(
                f"{flag_name(name)}: got {quoted(value)}; accepted are numbers with commas between them"
            ) from None

    @property
    def sites(self) -> list[str]:
        """Where tokens are dropped; by default, until a task knows the number of layers, "0.ffn"."""
        given = "0.ffn" if self.prune_sites is None else self.prune_sites
        return [part.strip() for part in given.split(",") if part.strip()]

    @property
    def left_out(self) -> list[str]:
        return [part.strip() for part in self.without.split(",") if part.strip()]

    @property
    def wanted(self) -> list[float]:
        """Mean retention per site."""
        given = self._list("retention")
        return given if len(given) == len(self.sites) else given * len(self.sites)

    @property
    def candidates(self) -> list[float]:
        """The ratios that an adaptive student chooses between."""
        return CANDIDATE_LISTS.get(self.retention_ratios) or self._list("retention_ratios")


TrainOptions.__doc__ = "\n".join((
    f"{inspect.getdoc(TrainOptions)}\n\nFields:",
    *(f"    {known.name}: {known.metadata['help']}" for known in dataclasses.fields(TrainOptions)),
))  # fmt: skip


def _range(low: float, high: float) -> str:
    if high == POSITIVE[1]:
        return "0 or more" if low == 0 else "above 0"
    return f"at least {low}" if high == COUNT[1] else f"from {low:g} to {high:g}"


def read_settings(path: Path) -> dict[str, Any]:
    """Read settings from YAML: a mapping of option names, with ``-`` or ``_``, to values.

    Raises:
        InputError: unreadable, not a mapping, an unknown name, or a value of the wrong type.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML without aliases: a few lines of them stand for gigabytes."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise InputError(
                    f"{path}: holds a YAML alias, *{self.peek_event().anchor}; write its value in its place"
                )
            return super().compose_node(parent, index)

    try:
        stored = yaml.load(read_document(path), Loader)
    except InputError:
        raise
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot be read as YAML ({ellipsize(str(error))})") from error
    if not isinstance(stored, Mapping):
        raise InputError(f"{path}: holds {type(stored).__name__}; accepted is a mapping of option names to values")
    check_nesting(stored, path)
    known = get_type_hints(TrainOptions)
    values = {}
    for key, value in stored.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise InputError(f"{path}: unknown option {quoted(key)}{did_you_mean(name, known)}; see adtp-train --help")
        values[name] = convert(name, value, f"{path}: {key}")
    return values


def convert(name: str, value: Any, where: str) -> Any:
    """Convert a value to the type of the field `name`; a list becomes text with commas, as the option is typed.

    Raises:
        InputError: it cannot be; `where` begins the message.
    """
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        value = ",".join(map(str, value))
    kind = field_type(name)
    try:
        if kind is int and float(value) != int(float(value)):
            raise ValueError
        return kind(float(value)) if kind is int else kind(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{where}: got {quoted(value)}; accepted is {_NAMES[kind]}") from None


_NAMES = {int: "an integer", float: "a number", str: "text"}


def field_type(name: str) -> type:
    """The plain type of a field, without ``| None``."""
    hint = get_type_hints(TrainOptions)[name]
    return next((kind for kind in getattr(hint, "__args__", ()) if kind is not type(None)), hint)


def as_yaml(settings: TrainOptions) -> str:
    """Write all settings, defaults included, as YAML that `read_settings` takes."""
    import yaml

    return yaml.safe_dump(dataclasses.asdict(settings), sort_keys=False)
