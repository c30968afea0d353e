"""The two stages, teacher and student, on `transformers.Trainer`: resumable, with the best checkpoint kept."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging as transformers_logging

from ..errors import InputError
from ..model.config import AdtpBertConfig, ratios_in_permille
from ..model.student import AdtpBertForSequenceClassification
from .data import Examples, Labels, LengthGrouped
from .distillation import Distillation
from .evaluate import explain, judge, judge_teacher, main_score
from .losses import share_for_retention
from .settings import Settings

Progress = Callable[[int, int], None]
Report = Callable[[str], None]
SHARE_ROWS = 2000
SLACK = 1.05

transformers_logging.set_verbosity_error()  # what a user should know, the stages say
transformers_logging.disable_progress_bar()


class StageTrainer(Trainer):
    """Trainer with our order of batches, our evaluation, two learning rates, and a stop at the first loss that is no number.

    Args:
        examples: the training rows.
        judged: gives the figures of an evaluation.
        fast: parameters with this in their names learn at this rate.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        examples: Examples,
        judged: Callable[[], dict[str, float]],
        fast: tuple[str, float] | None,
        narrator: Narrator,
    ) -> None:
        self.examples, self.judged, self.fast, self.narrator = examples, judged, fast, narrator
        super().__init__(
            model,
            args,
            train_dataset=examples,
            eval_dataset=examples,
            data_collator=examples.collate,
            callbacks=[narrator],
        )

    def _get_train_sampler(self, *arguments: Any) -> LengthGrouped:
        self.narrator.order = LengthGrouped(self.examples.lengths, self.args.train_batch_size, self.args.seed)
        return self.narrator.order

    def create_optimizer(self, *arguments: Any) -> torch.optim.Optimizer:
        """AdamW; no decay on biases and LayerNorms."""
        if self.optimizer is None:
            groups: dict[tuple[float, float], list[nn.Parameter]] = {}
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    rate = self.fast[1] if self.fast and self.fast[0] in name else self.args.learning_rate
                    decay = self.args.weight_decay if parameter.dim() > 1 else 0.0
                    groups.setdefault((rate, decay), []).append(parameter)
            self.optimizer = torch.optim.AdamW(
                [{"params": p, "lr": rate, "weight_decay": decay} for (rate, decay), p in groups.items()], fused=True
            )
        return self.optimizer

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *arguments: Any, **options: Any) -> Tensor:
        """Compute the loss of a batch.

        Raises:
            InputError: it is no finite number; the message names the step.
        """
        if isinstance(self.model, Distillation):
            self.model.progress = self.state.global_step / max(1, self.state.max_steps)
        loss: Tensor = model(**inputs)["loss"]
        if not math.isfinite(loss.item()):
            raise InputError(
                f"the loss became {loss.item()} at step {self.state.global_step + 1} of {self.state.max_steps}, at a "
                f"learning rate of {self.args.learning_rate:g}; start anew with a lower one and --force"
            )
        return loss

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        figures = {f"eval_{name}": value for name, value in self.judged().items()}
        self.log(figures)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, figures)
        return figures


class Narrator(TrainerCallback):
    """Shows progress, and one line per evaluation; tells the order of rows which epoch it is."""

    def __init__(self, progress: Progress, report: Report) -> None:
        self.progress, self.report = progress, report
        self.loss = float("nan")
        self.order: LengthGrouped | None = None

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if self.order is not None:  # accelerate forwards the epoch to some kinds of loaders only
            self.order.set_epoch(int(state.epoch or 0))

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.progress(state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **rest: Any) -> None:
        self.loss = (logs or {}).get("loss", self.loss)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict | None = None, **rest: Any) -> None:
        figures = ", ".join(f"{name.removeprefix('eval_')} {value:.4f}" for name, value in (metrics or {}).items())
        self.report(f"step {state.global_step} of {state.max_steps}: loss {self.loss:.4f}; on dev: {figures}")


def run_stage(
    model: nn.Module,
    examples: Examples,
    judged: Callable[[], dict[str, float]],
    settings: Settings,
    work: Path,
    epochs: float,
    rate: float,
    progress: Progress,
    report: Report,
    fast: tuple[str, float] | None = None,
) -> None:
    """Train `model` in place and leave the weights of its best evaluation in it; goes on where `work` has checkpoints."""
    rows = settings.batch_size * PartialState().num_processes
    steps = max(1, math.ceil(len(examples) / rows * epochs))
    every = max(1, math.ceil(steps / settings.evaluations))
    arguments = TrainingArguments(
        output_dir=str(work),
        per_device_train_batch_size=settings.batch_size,
        num_train_epochs=epochs,
        learning_rate=rate,
        weight_decay=settings.weight_decay,
        warmup_steps=round(settings.warmup * steps),
        seed=settings.seed,
        eval_strategy="steps",
        eval_steps=every,
        save_strategy="steps",
        save_steps=every,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=True,
        logging_steps=min(every, 50),
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to=[],
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        ddp_find_unused_parameters=isinstance(model, Distillation) and 0 in model.weights.values(),
        use_cpu=not torch.cuda.is_available(),
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # several devices are several processes: threads of one would share the packed view
    trainer = StageTrainer(model, arguments, examples, judged, fast, Narrator(progress, report))
    trainer.remove_callback(PrinterCallback)
    last = last_checkpoint(work)
    if last is not None:
        report(f"going on from {last.name}")
    trainer.train(resume_from_checkpoint=str(last) if last else None)


def last_checkpoint(work: Path) -> Path | None:
    """Return the newest checkpoint that was written to its end, which its `trainer_state.json` marks."""
    count = PartialState().num_processes
    random_states = [f"rng_state_{rank}.pth" for rank in range(count)] if count > 1 else ["rng_state.pth"]
    whole = [
        state.parent
        for state in work.glob(f"{PREFIX_CHECKPOINT_DIR}-*/trainer_state.json")
        if _is_json(state) and all((state.parent / name).is_file() for name in random_states)
    ]
    return max(whole, key=lambda path: int(path.name.rsplit("-", 1)[1]), default=None)


def _is_json(path: Path) -> bool:
    return path.read_text(encoding="utf-8").rstrip().endswith("}")


def load_tokenizer(source: str) -> PreTrainedTokenizerFast:
    """Load a fast tokenizer.

    Raises:
        InputError: there is none.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:  # missing files, no network, unknown classes: many types
        raise InputError(f"{source}: the tokenizer cannot be loaded: {error}") from error
    if not tokenizer.is_fast or tokenizer.pad_token_id is None:
        raise InputError(f"{source}: accepted is a fast tokenizer with a padding token; BERT's has both")
    return tokenizer  # type: ignore[return-value] # typed as every backend there is


def load_config(source: str) -> PretrainedConfig:
    """Load the configuration of an encoder.

    Raises:
        InputError: it cannot be loaded, or is no BERT.
    """
    try:
        config = AutoConfig.from_pretrained(source)
    except Exception as error:  # missing files, no network, unknown types: many types
        raise InputError(f"{source}: the model cannot be loaded: {error}") from error
    if config.model_type != "bert":
        raise InputError(
            f"{source}: model_type is {config.model_type!r}; accepted is 'bert', which students are made of"
        )
    return config


def labels_of_teacher(source: str, config: PretrainedConfig, labels: Labels) -> Labels:
    """Return the data's labels in the teacher's order.

    Raises:
        InputError: the teacher knows others, or another number of them.
    """
    known = tuple(str(config.id2label[i]) for i in sorted(config.id2label))
    if len(known) == len(labels.names or ("score",)):
        if labels.regression or all(name.startswith("LABEL_") for name in known):
            return labels
        if set(known) == set(labels.names):
            return Labels(known)
    raise InputError(
        f"{source}: the teacher does not match: it knows {', '.join(known)}, the data has "
        f"{', '.join(labels.names) or 'numbers'}; leave --teacher out to fine-tune one"
    )


def load_classifier(source: str, labels: Labels, tuned: bool) -> PreTrainedModel:
    """Load an encoder of BERT's kind as a classifier for `labels`.

    Args:
        tuned: it is a teacher that knows these labels already (`labels_of_teacher`).

    Raises:
        InputError: it cannot be loaded, or has no head where it should.
    """
    names = dict(enumerate(labels.names or ("score",)))
    fields: dict[str, Any] = {"id2label": names, "label2id": {name: i for i, name in names.items()}}
    if not tuned:
        fields["problem_type"] = "regression" if labels.regression else "single_label_classification"
    try:
        model, found = AutoModelForSequenceClassification.from_pretrained(
            source,
            dtype=torch.float32,
            use_safetensors=True,
            ignore_mismatched_sizes=not tuned,  # a base may have the head of another task, which is made anew
            output_loading_info=True,
            **fields,
        )
    except Exception as error:
        raise InputError(f"{source}: the model cannot be loaded: {error}") from error
    if tuned and found["missing_keys"]:
        missing = ", ".join(sorted(found["missing_keys"])[:4])
        raise InputError(f"{source}: no teacher: its file has no {missing}; leave --teacher out and give it as --base")
    return model


def train_teacher(
    base: str,
    parts: dict[str, Examples],
    labels: Labels,
    settings: Settings,
    work: Path,
    progress: Progress,
    report: Report,
) -> PreTrainedModel:
    """Fine-tune a pretrained encoder on the task."""
    set_seed(settings.seed)
    model = load_classifier(base, labels, tuned=False)

    def judged() -> dict[str, float]:
        figures = judge_teacher(model, parts["dev"])
        return {**figures, "score": main_score(figures)}

    rate = settings.teacher_learning_rate
    run_stage(model, parts["train"], judged, settings, work, settings.teacher_epochs, rate, progress, report)
    return model.eval()


def explained(
    teacher: PreTrainedModel, examples: Examples, settings: Settings, cache: Path, progress: Progress
) -> Examples:
    """Add the teacher's answers and attribution to `examples`, computed once and kept in `cache`.

    They depend on the teacher alone, so reading them is faster than computing them from the second epoch on, and from the
    first epoch on in the next run with the same teacher.
    """
    dimensions = max(1, round(settings.teacher_dimensions * teacher.config.hidden_size))
    key = hashlib.sha256(f"{settings.ig_steps} {dimensions}".encode())
    for weight in teacher.state_dict().values():
        key.update(weight.cpu().contiguous().numpy().tobytes())
    for row in examples.encoded:
        key.update(str(row.input_ids).encode() + str(row.token_type_ids).encode())
    path = cache / f"{key.hexdigest()[:32]}.safetensors"
    if path.is_file():
        stored = load_file(path)
        return examples.with_teacher(stored["logits"], list(stored["attribution"].split(examples.lengths)))
    logits, attribution = explain(teacher, examples, settings.ig_steps, dimensions, progress)
    cache.mkdir(parents=True, exist_ok=True)
    save_file({"logits": logits, "attribution": torch.cat(attribution)}, path.with_suffix(".partial"))
    path.with_suffix(".partial").rename(path)
    return examples.with_teacher(logits, attribution)


def student_config(encoder: PretrainedConfig, settings: Settings) -> AdtpBertConfig:
    """Return the configuration of a student of `encoder`.

    Raises:
        InputError: sites, ratios or sizes that it refuses, or more layers than the encoder has.
    """
    fields = encoder.to_dict()
    if settings.layers is not None and settings.layers > fields["num_hidden_layers"]:
        raise InputError(f"--layers: got {settings.layers}; the teacher has {fields['num_hidden_layers']}")
    for name in ("model_type", "architectures", "transformers_version", "dtype", "torch_dtype"):
        fields.pop(name, None)
    own = {
        "num_hidden_layers": settings.layers or fields["num_hidden_layers"],
        "prune_sites": settings.sites,
        "retention_ratios": settings.candidates,
        "saliency_hidden_size": settings.saliency_hidden_size,
        "min_tokens": settings.min_tokens,
    }
    return AdtpBertConfig(**fields | own)


def make_student(teacher: PreTrainedModel, settings: Settings) -> AdtpBertForSequenceClassification:
    """Start a student from its teacher: the same weights, or those of some layers, and new retainers.

    Raises:
        InputError: as in `student_config`; or the teacher's weights are not BERT's.
    """
    set_seed(settings.seed)
    config = student_config(teacher.config, settings)
    available, layers = teacher.config.num_hidden_layers, config.num_hidden_layers
    student = AdtpBertForSequenceClassification(config)
    chosen = [round((i + 1) * available / layers) - 1 for i in range(layers)]
    weights = {}
    for name, weight in teacher.state_dict().items():
        if name.startswith("bert.encoder.layer."):
            number, rest = name.removeprefix("bert.encoder.layer.").split(".", 1)
            if int(number) not in chosen:
                continue
            name = f"bert.encoder.layer.{chosen.index(int(number))}.{rest}"
        weights[name] = weight
    missing, surplus = student.load_state_dict(weights, strict=False)
    wrong = [n for n in missing if "retainers" not in n] + [n for n in surplus if not n.endswith("position_ids")]
    if wrong:
        raise InputError(f"the teacher does not match: its weights differ from BERT's in {', '.join(wrong[:4])}")
    return student


def train_student(
    teacher: PreTrainedModel,
    parts: dict[str, Examples],
    settings: Settings,
    work: Path,
    progress: Progress,
    report: Report,
) -> Distillation:
    """Distil a student from rows that hold the teacher's view (`explained`)."""
    student = make_student(teacher, settings)
    model = Distillation(student, settings, _first_shares(parts["train"], student.config, settings))

    def judged() -> dict[str, float]:
        judgement = judge(model, parts["dev"])
        alive = [int(count.sum()) for count in judgement.alive]
        kept = [after / before for before, after in zip(alive, alive[1:])]
        model.meet_on_dev(kept)
        # Keeping more than was asked for is an easy way to be right, and no way to be the best checkpoint.
        excess = max((share / wanted - SLACK for share, wanted in zip(kept, settings.wanted)), default=0.0)
        told = {f"kept_{site}": share for site, share in zip(settings.sites, kept)}
        return {**judgement.quality, **told, "score": main_score(judgement.quality) - max(0.0, excess)}

    retainers = (".retainers.", settings.retainer_learning_rate)
    run_stage(
        model,
        parts["train"],
        judged,
        settings,
        work,
        settings.epochs,
        settings.learning_rate,
        progress,
        report,
        retainers,
    )
    return model.eval()


def _first_shares(train: Examples, config: AdtpBertConfig, settings: Settings) -> list[float]:
    """Per site, the share of the teacher's attribution at which the wanted retention is met, as if each were the first."""
    assert train.attribution is not None
    rows = train.attribution[:: max(1, len(train) // SHARE_ROWS)]
    attribution = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    candidates = torch.arange(attribution.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    candidates[:, 0] = False
    permille = ratios_in_permille(config.retention_ratios)
    return [share_for_retention(attribution, candidates, permille, wanted) for wanted in settings.wanted]


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write a checkpoint that transformers and `adtp-export` load."""
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
