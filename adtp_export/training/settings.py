"""Every knob of a training run, in one dataclass: the command's options, the YAML file's keys and the record share it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..contract import HEAD_EMBEDDING, HEAD_SEQUENCE, HEAD_SPANS, HEAD_TOKENS
from ..errors import InputError, did_you_mean, ellipsize, flag_name, quoted
from ..io import check_nesting, read_document
from ..options import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, Options, Range, at_least, option, options_of
from .method_table import ATTRIBUTION, METHODS

CANDIDATE_LISTS = {
    "5": [0.2, 0.4, 0.6, 0.8, 1.0],
    "10": [round(0.1 * i, 3) for i in range(1, 11)],
    "20": [round(0.05 * i, 3) for i in range(1, 21)],
}
RATIOS = ("adaptive", "static")
INTEGRATED_GRADIENTS, GRADIENT_DIFFERENCE = "integrated-gradients", "gradient-difference"
ATTRIBUTIONS = (INTEGRATED_GRADIENTS, GRADIENT_DIFFERENCE)
MASK_NONE, MASK_ATTRIBUTION, MASK_RANDOM = "none", "attribution", "random"
LOSS_OF_TEACHER, QUALITY = "loss", "quality"
FULL_PRECISION, BF16 = "no", "bf16"
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

PRUNER = "pruner"
LOSS = "loss, (1 - alpha) L_CE + alpha L_logit; with adtp + beta L_IG + gamma (L_ARP + L_TSP)"
"""Headings of ``--help``."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Options):
    """How to train. Field names are option names with ``_`` for ``-``."""

    # An option is one paragraph, which a formatter would take apart.
    # fmt: off
    data: str | None = option(None,
        "data set of the `datasets` library: NAME, OWNER/NAME, OWNER/NAME/CONFIG, or glue/CONFIG as in glue/sst2", "data", metavar="NAME")
    train: str | None = option(None,
        "instead of --data, a local file: .tsv, .csv, .jsonl or SQuAD's .json with labels, or texts (also .txt) for embedding; each also "
        ".gz",
        "data", metavar="FILE")
    dev: str | None = option(None,
        "file on which the best checkpoint is chosen (default: a share of the training rows)", "data", metavar="FILE")
    test: str | None = option(None,
        "file on which the result is evaluated (default: the dev rows, and the record says so)", "data", metavar="FILE")
    text_column: str | None = option(None,
        "text column, or two separated by a comma for pairs (default: the usual names)", "data", metavar="C")
    label_column: str = option("label", "label column", "data", metavar="C")
    task: str = option(AUTO,
        "auto takes columns tokens and tags for tags; question, context and answers for spans; labels with a fraction for regression; "
        "and otherwise classification", "data", choices=TASKS)
    dev_share: float = option(0.05,
        "share of the training rows held out if there is no dev split", "data",
        within=Range(1e-6, 0.9, "from 0.000001 to 0.9"))
    train_rows: int | None = option(None, "train on this many rows, drawn with seed 0", "data", within=COUNT)
    max_tokens: int | None = option(None,
        "length at which texts are truncated, and to which the padded baseline is padded (default: 128, or what the model reads)",
        "data", within=at_least(4))
    stride: int | None = option(None,
        "for spans: number of tokens by which windows of a long context overlap (default: a quarter of --max-tokens)",
        "data", within=at_least(0))
    max_answer_tokens: int = option(30, "for spans: maximum number of tokens of an answer", "data", within=COUNT)

    base: str | None = option(None,
        "pretrained encoder to fine-tune a teacher from: a directory or a Hugging Face Hub repository",
        "models", metavar="MODEL")
    teacher: str | None = option(None,
        "instead of --base, a model that is fine-tuned for the task already; for vectors a sentence-transformers directory",
        "models", metavar="MODEL")
    layers: int | None = option(None,
        "number of layers of the student, taken evenly from the teacher's (default: all)", "models", within=COUNT)

    method: str = option("adtp",
        "pruning method: how tokens are chosen, and how that is trained; layers drops none", PRUNER, choices=tuple(METHODS))
    prune_sites: str | None = option(None,
        "where tokens are dropped: i.attention or i.ffn of layer i, separated by commas (default: 0.ffn; ltp, schedule: all i.ffn; top: "
        "i.attention from layer 1 on; transkimmer: all i.attention)", PRUNER, metavar="LIST")
    retention_ratios: str = option("20",
        "candidate ratios: 5, 10 or 20 evenly spaced ones, or a list such as 0.1,0.3,1.0", PRUNER, metavar="LIST")
    saliency_hidden_size: int = option(96, "hidden size of the saliency predictor", PRUNER, within=COUNT)
    min_tokens: int = option(1, "minimum number of tokens that every text keeps", PRUNER, within=COUNT)
    ratio: str = option("adaptive",
        "for adtp: adaptive predicts a ratio for each text, static uses one for all", PRUNER, choices=RATIOS)
    retention: str | None = option(None,
        "for adtp, random and schedule: share that a prune site keeps of the tokens that reach it, mean over dev; one value, or one per "
        f"site, separated by commas (default: {RETENTION}; schedule: what --flops {FLOPS} leaves)",
        PRUNER, metavar="LIST")
    flops: float | None = option(None,
        "instead of --retention, for all methods but layers: share of the FLOPs of the unpadded dense encoder to be left, over dev "
        f"(default: {FLOPS} for ltp, schedule, top and transkimmer, unless --retention is given)",
        PRUNER, within=Range(1e-3, 1, "from 0.001 to 1"))
    teacher_forced_share: float = option(0.1,
        "share of the training steps, at the start, in which the teacher's attribution chooses the tokens to keep instead of the "
        "student's retainer", PRUNER, within=SHARE)
    cut_warmup: float = option(0.0,
        "for adtp and random: share of the training steps over which the cuts tighten, from keeping all tokens to keeping what the student "
        "decides", PRUNER, within=SHARE)

    alpha: float = option(0.5, "weight of L_logit; cross-entropy has the weight 1 - alpha", LOSS, within=SHARE)
    beta: float = option(0.1, "weight of L_IG", LOSS, within=NOT_NEGATIVE)
    gamma: float = option(0.2, "weight of L_ARP + L_TSP; with top, of L_rank", LOSS, within=NOT_NEGATIVE)
    kappa: float = option(0.5,
        "share of the student's own attribution in the targets of the retainer at the end of training; it rises from 0",
        LOSS, within=SHARE)
    temperature: float = option(2.0, "temperature of L_logit", LOSS, within=POSITIVE)
    attribution: str = option(INTEGRATED_GRADIENTS,
        "which tokens are worth keeping: integrated-gradients of the teacher, or gradient-difference, the teacher's gradient norms minus "
        "the student's (LeaF)", LOSS, choices=ATTRIBUTIONS)
    mask: str = option(MASK_NONE,
        "learn a text that the student gets wrong and its teacher right once more, without some tokens: those of lowest --attribution, "
        "which with gradient-difference are LeaF's confounding tokens; or random ones", LOSS,
        choices=(MASK_NONE, MASK_ATTRIBUTION, MASK_RANDOM))
    mask_share: float = option(0.1,
        "share of a text's tokens that --mask removes, at least one; the first and the last stay", LOSS,
        within=Range(1e-3, 0.9, "from 0.001 to 0.9, as a mask of every token leaves nothing to learn from"))
    mask_weight: float = option(1.0,
        "weight of a masked text in the loss; with 1 it counts as one more row of its batch", LOSS, within=POSITIVE)
    ig_steps: int = option(1, "number m of steps of integrated gradients", LOSS, within=COUNT)
    teacher_dimensions: float = option(0.9,
        "share of hidden dimensions that the teacher's attribution keeps: the largest of each token",
        LOSS, within=SHARE)
    ablate: str = option("",
        "terms of the loss to leave out, separated by commas: ce, logit, ig, arp, tsp; with top rank; teacher leaves out all of the "
        "teacher's", LOSS, metavar="LIST")

    teacher_epochs: float = option(1.0, "epochs of fine-tuning the teacher", "schedule", within=POSITIVE)
    epochs: float = option(3.0, "epochs of training the student", "schedule", within=POSITIVE)
    teacher_learning_rate: float = option(8e-5, "peak learning rate of the teacher", "schedule", within=POSITIVE)
    learning_rate: float = option(8e-5, "peak learning rate of the student's encoder", "schedule", within=POSITIVE)
    retainer_learning_rate: float = option(1e-3,
        "peak learning rate of the pruners, whose weights start at random", "schedule", within=POSITIVE)
    weight_decay: float = option(0.01, "weight decay of AdamW", "schedule", within=NOT_NEGATIVE)
    warmup: float = option(0.06,
        "share of the steps over which the learning rate rises to its peak", "schedule", within=SHARE)
    batch_size: int = option(32, "rows per step and device", "schedule", within=COUNT)
    evaluations: int = option(4,
        "number of evaluations on dev, spread evenly over a stage; the best checkpoint is kept",
        "schedule", within=COUNT)
    best_by: str = option(LOSS_OF_TEACHER,
        "which checkpoint of a student is the best: of the lowest loss against the teacher's answers, or of the highest quality by the "
        "labels. Teachers, and students without one, are chosen by quality", "schedule", choices=(LOSS_OF_TEACHER, QUALITY))
    patience: int | None = option(None,
        "end a stage after this many evaluations in a row without a better checkpoint; those before decisions are final, with ltp, top "
        "and transkimmer, do not count (default: train to the end)", "schedule", within=COUNT)
    mixed_precision: str = option(FULL_PRECISION,
        "bf16 computes the matrix products of training steps in bfloat16, which is faster on GPUs and processors that support it; weights, "
        "pruners, evaluation and the teacher's attribution stay in fp32", "schedule",
        choices=(FULL_PRECISION, BF16))
    seed: int = option(0, "seed of initialisation, order of rows and dropout", "schedule", within=at_least(0))
    # fmt: on

    def check(self) -> None:
        self._check_method()
        if self.dev is not None:
            self._check_defaults(["dev_share"], "beside --dev; leave one of them out")
        if self.ratio == "static":
            self._check_defaults(["retention_ratios"], "with --ratio static; leave it out")
        self._check_terms()
        given = self._list("retention")
        if not all(1e-3 <= value <= 1 for value in given):
            raise InputError(f"--retention: got {quoted(self.retention)}; accepted is from 0.001 to 1")
        default = METHODS[self.method].sites
        settled = self.prune_sites is not None or default(1) == default(2)  # else a task knows the number of layers
        if settled and len(given) not in (1, len(self.sites)):
            sites = f"{len(self.sites)} prune site{'' if len(self.sites) == 1 else 's'}"
            raise InputError(f"--retention: got {quoted(self.retention)} for {sites}; give one value, or one per site")
        from ..model.pruners.adtp import ratios_in_permille  # brings in torch, which --help does without

        ratios_in_permille(self.candidates)

    def _check_method(self) -> None:
        """Raises InputError for a setting that other methods have, and this one has not."""
        if not METHODS[self.method].cuts:
            for name in ("prune_sites", "retention", "flops"):
                if value := getattr(self, name):
                    raise InputError(
                        f"{flag_name(name)}: got {quoted(value)}; --method {self.method} drops no tokens. Leave it out, and give --layers"
                    )
        for known in dataclasses.fields(self):
            users = [name for name, facts in METHODS.items() if known.name in facts.settings]
            if users and self.method not in users and getattr(self, known.name) != known.default:
                instead = "give --flops, or leave it out" if known.name == "retention" else "leave it out"
                raise InputError(
                    f"{flag_name(known.name)}: got {quoted(getattr(self, known.name))}; --method {self.method} has no such setting, "
                    f"and {', '.join(users)} have: {instead}"
                )

    def _check_defaults(self, names: Iterable[str], why: str) -> None:
        """Raises InputError for the first of these settings that is not the default; `why` says when nothing uses it."""
        for name in names:
            if (value := getattr(self, name)) != getattr(TrainOptions, name):
                raise InputError(f"{flag_name(name)}: got {quoted(value)}, which nothing uses {why}")

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
        self._check_mask()
        if self.method == "top" and not (self.weights["ce"] or self.weights["logit"]):
            raise InputError("--method top ends without its own term; leave ce or logit in, with a weight above 0")
        if not any(self.weights.values()):
            raise InputError(
                "the loss has no term left; leave fewer out with --ablate, or give one of them a weight above 0"
            )

    def _check_mask(self) -> None:
        """Raises InputError for a mask without a teacher or a loss, and for settings of a mask that is not wanted."""
        names = ["mask_share", "mask_weight"] if self.mask == MASK_NONE else []
        if self.method == "layers" and self.mask != MASK_ATTRIBUTION:
            names += ["attribution", "ig_steps", "teacher_dimensions"]
        needed = f"--mask {MASK_ATTRIBUTION}" if self.mask == MASK_RANDOM else "--mask"
        self._check_defaults(names, f"without {needed}; give that or leave this out")
        if self.mask == MASK_NONE:
            return
        if "teacher" in self.left_out:
            raise InputError(
                f"--mask {self.mask} is for texts that the teacher answers rightly, and --ablate teacher has none; leave one of them out"
            )
        if not (self.weights["ce"] or self.weights["logit"]):
            raise InputError(
                f"--mask {self.mask}: masked texts have the terms ce and logit; leave one in, with a weight above 0"
            )

    @property
    def view(self) -> str:
        """What the teacher is asked: what the method needs, and what a mask needs."""
        return ATTRIBUTION if self.mask == MASK_ATTRIBUTION else METHODS[self.method].view

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
        if not METHODS[self.method].cuts:
            return []
        given = "0.ffn" if self.prune_sites is None else self.prune_sites
        return [part.strip() for part in given.split(",") if part.strip()]

    @property
    def left_out(self) -> list[str]:
        return [part.strip() for part in self.ablate.split(",") if part.strip()]

    @property
    def target_retention(self) -> list[float]:
        """Mean retention per site."""
        given = self._list("retention")
        return given if len(given) == len(self.sites) else given * len(self.sites)

    @property
    def candidates(self) -> list[float]:
        """The ratios that an adaptive student chooses between."""
        return CANDIDATE_LISTS.get(self.retention_ratios) or self._list("retention_ratios")


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
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file; give another one with --config FILE") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot be read as YAML ({ellipsize(str(error))})") from error
    if not isinstance(stored, Mapping):
        raise InputError(f"{path}: holds {type(stored).__name__}; accepted is a mapping of option names to values")
    check_nesting(stored, path)
    known = [field.name for field in dataclasses.fields(TrainOptions)]
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
    kind = next(known.kind for known in options_of(TrainOptions) if known.name == name)
    try:
        if isinstance(value, bool):  # YAML reads yes and no so
            if kind is not str:
                raise TypeError
            value = "yes" if value else "no"
        if kind is int and float(value) != int(float(value)):
            raise ValueError
        return kind(float(value)) if kind is int else kind(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{where}: got {quoted(value)}; accepted is {_NAMES[kind]}") from None


_NAMES = {int: "an integer", float: "a number", str: "text"}


def as_yaml(settings: TrainOptions) -> str:
    """Write all settings, defaults included, as YAML that `read_settings` takes."""
    import yaml

    return yaml.safe_dump(dataclasses.asdict(settings), sort_keys=False)
