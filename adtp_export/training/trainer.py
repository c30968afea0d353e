"""One stage of training on `transformers.Trainer`: resumable, with the best checkpoint kept."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging as transformers_logging

from ..environment import give_back_freed_memory, keep_freed_memory
from ..errors import InputError
from ..model.weights import no_bars
from .checkpoints import WEIGHTS, broken_seal, forget_newer, newest_whole, seal
from .data import Examples, LengthGrouped
from .methods.base import Method
from .settings import BF16, TrainOptions

Progress = Callable[[int, int], None]
"""Takes (done, total)."""


class DivergedError(InputError):
    """A loss was no finite number."""


@dataclass(frozen=True)
class Audience:
    """Who is told how a stage goes: `progress` takes steps done and all steps, `note` a line of text."""

    progress: Progress
    note: Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What is trained, on what, and for how long.

    model: its `forward` returns a mapping with ``loss``; trained in place. judged: gives the figures of an evaluation; the
    checkpoint of the highest "score" wins. rate: peak learning rate; rates: those of single parameters, where they differ.
    work: folder of checkpoints. best: what "score" stands for, in messages. final_from: share of the steps before which the model is not
    yet what it is to become: an evaluation there neither wins nor counts for `patience`.
    """

    model: nn.Module
    examples: Examples
    judged: Callable[[], dict[str, float]]
    epochs: float
    rate: float
    work: Path
    rates: Mapping[nn.Parameter, float] = field(default_factory=dict)
    best: str = "quality"
    final_from: float = 0.0


def run_stage(stage: Stage, settings: TrainOptions, audience: Audience) -> bool:
    """Train a model and leave the weights of its best evaluation in it; goes on where the stage has checkpoints.

    Returns:
        Whether the best evaluation was the last one.

    Raises:
        DivergedError: the loss is no finite number.
        InputError: the stage has checkpoints, and all are damaged.
    """
    trainer = StageTrainer(stage, settings, Narrator(audience))
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Keeper(stage, settings.patience, audience))
    last = newest_whole(stage.work, PartialState().num_processes, audience.note)
    if last is not None:
        audience.note(f"going on from {last.name}")
        forget_newer(last)
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    if (best := trainer.state.best_global_step) is not None:
        audience.note(f"kept step {best} of {trainer.state.max_steps}, of the best {stage.best} on dev")
    return best == max((entry["step"] for entry in trainer.state.log_history if "eval_score" in entry), default=None)


def training_arguments(stage: Stage, settings: TrainOptions) -> TrainingArguments:
    """Say in transformers' terms what the settings ask for."""
    rows = settings.batch_size * PartialState().num_processes
    steps = max(1, math.ceil(math.ceil(len(stage.examples) / rows) * stage.epochs))  # as transformers counts them
    every = max(1, math.ceil(steps / settings.evaluations))
    arguments = TrainingArguments(
        output_dir=str(stage.work),
        per_device_train_batch_size=settings.batch_size,
        num_train_epochs=stage.epochs,
        learning_rate=stage.rate,
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
        ddp_find_unused_parameters=isinstance(stage.model, Method) and stage.model.leaves_weights_out,
        use_cpu=not torch.cuda.is_available(),
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # several devices are several processes: threads of one would share the packed view
    return arguments


def this_process() -> PartialState:
    """Say which of how many processes this one is, and on which device it trains: without a GPU the CPU, where freed memory is kept."""
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        keep_freed_memory()
    return PartialState(cpu=on_cpu)


def autocast(settings: TrainOptions, device: torch.device) -> torch.autocast:
    """Return the context in which the loss of a step is computed."""
    return torch.autocast(device.type, torch.bfloat16, enabled=settings.mixed_precision == BF16)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers, as the stages tell what a user should know; the caller's settings come back at the end."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with no_bars():
            yield
    finally:
        transformers_logging.set_verbosity(level)


class StageTrainer(Trainer):
    """Trainer with our order of batches, our evaluation, rates by parameter, and a stop at the first loss that is no number."""

    def __init__(self, stage: Stage, settings: TrainOptions, narrator: Narrator) -> None:
        self.stage, self.settings, self.narrator = stage, settings, narrator
        self._first: Tensor | None = None
        super().__init__(
            stage.model,
            training_arguments(stage, settings),
            train_dataset=stage.examples,
            eval_dataset=stage.examples,
            data_collator=stage.examples.collate,
            callbacks=[narrator],
        )

    def _get_train_sampler(self, *arguments: Any) -> LengthGrouped:
        self.narrator.order = LengthGrouped(self.stage.examples.lengths, self.args.train_batch_size, self.args.seed)
        return self.narrator.order

    def groups(self) -> dict[tuple[float, float], list[nn.Parameter]]:
        """Return the parameters by rate and decay; no decay on biases and LayerNorms."""
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for parameter in self.stage.model.parameters():
            if parameter.requires_grad:
                rate = self.stage.rates.get(parameter, self.args.learning_rate)
                decay = self.args.weight_decay if parameter.dim() > 1 else 0.0
                groups.setdefault((rate, decay), []).append(parameter)
        return groups

    def create_optimizer(self, *arguments: Any) -> torch.optim.Optimizer:
        """Return AdamW with our groups."""
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(
                [{"params": p, "lr": rate, "weight_decay": decay} for (rate, decay), p in self.groups().items()],
                fused=True,
            )
        return self.optimizer

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *arguments: Any, **options: Any) -> Tensor:
        """Compute the loss of a batch; `check_losses` says whether it is a number."""
        if isinstance(self.model, Method):
            self.model.progress = self.state.global_step / max(1, self.state.max_steps)
        with autocast(self.settings, self.args.device):
            loss: Tensor = model(**inputs)["loss"]
        value = loss.detach().float()
        here = torch.stack([torch.full_like(value, self.state.global_step + 1), value])
        # The first one that is no number stays. It is kept on the device: to look at it, as in each step, would wait for the device.
        self._first = here if self._first is None else torch.where(self._first[1].isfinite(), here, self._first)
        return loss

    def check_losses(self) -> None:
        """See that all losses so far were finite.

        Raises:
            DivergedError: one was not; the message names the step.
        """
        step, loss = (1.0, 0.0) if self._first is None else self._first.tolist()
        if not math.isfinite(loss):
            raise DivergedError(
                f"the loss became {loss} at step {step:.0f} of {self.state.max_steps}, at a "
                f"learning rate of {self.args.learning_rate:g}; start anew with a lower one, in another --out"
            )

    def log(self, *arguments: Any, **options: Any) -> None:
        """Tell the loss, every 50 steps or more often, which waits for the device in any case; and give back memory."""
        self.check_losses()
        give_back_freed_memory()
        super().log(*arguments, **options)

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        self.check_losses()
        super()._save_checkpoint(*arguments, **options)

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        self.check_losses()
        figures = {f"eval_{name}": value for name, value in self.stage.judged().items()}
        # Processes that disagreed on the best checkpoint would wait for each other.
        (figures,) = broadcast_object_list([figures])
        if self.state.global_step < self.stage.final_from * self.state.max_steps:
            figures["eval_score"] = -math.inf
        self.log(figures)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, figures)
        return figures


class Narrator(TrainerCallback):
    """Shows progress, and one line per evaluation; tells the order of rows which epoch it is."""

    def __init__(self, audience: Audience) -> None:
        self.audience = audience
        self.loss = float("nan")
        self.order: LengthGrouped | None = None

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if self.order is not None:  # accelerate forwards the epoch to some kinds of loaders only
            self.order.set_epoch(int(state.epoch or 0))

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.audience.progress(state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **rest: Any) -> None:
        self.loss = (logs or {}).get("loss", self.loss)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict | None = None, **rest: Any) -> None:
        figures = ", ".join(
            f"{name.removeprefix('eval_')} {value:.4f}"
            for name, value in (metrics or {}).items()
            if value != -math.inf  # the score of a model that is not final
        )
        self.audience.note(f"step {state.global_step} of {state.max_steps}: loss {self.loss:.4f}; on dev: {figures}")


class Keeper(TrainerCallback):
    """Seals checkpoints, ends a stage that gets no better, and sees before the first step that the best one is there to come back to."""

    def __init__(self, stage: Stage, patience: int | None, audience: Audience) -> None:
        self.stage, self.patience, self.audience = stage, patience, audience
        self.ended = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Where the best checkpoint so far is damaged, the one that is gone on from takes its place."""
        if state.best_global_step is None:
            return
        self.ended = self.over(state)
        best = _checkpoint(args, state.best_global_step)
        if state.best_global_step != state.global_step and (found := broken_seal(best, [WEIGHTS])):
            best = _checkpoint(args, state.global_step)
            self.audience.note(f"the best checkpoint so far is damaged ({found}); {best.name} takes its place")
            state.best_global_step = state.global_step
            state.best_metric = [entry["eval_score"] for entry in state.log_history if "eval_score" in entry][-1]
        state.best_model_checkpoint = str(best)  # the run may have been moved since

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        processes = PartialState()
        processes.wait_for_everyone()  # each writes a random state
        if processes.is_main_process:
            seal(_checkpoint(args, state.global_step))
        control.should_training_stop |= self.over(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """See that the last step is evaluated. Where a run goes on from the checkpoint that it ended with, transformers takes one more
        step: nothing comes of it."""
        if state.global_step >= state.max_steps:
            control.should_evaluate = control.should_save = True  # transformers 4 does not see to it
        if self.ended:
            control.should_evaluate = control.should_save = False
            control.should_training_stop = True

    def over(self, state: Any) -> bool:
        """Say whether so many evaluations in a row were no better that the stage ends before its last step."""
        first = max(state.best_global_step or 0, self.stage.final_from * state.max_steps)
        # The history is part of a checkpoint, so a run that goes on from one counts alike.
        worse = sum("eval_score" in entry and entry["step"] > first for entry in state.log_history)
        if self.patience is None or worse < self.patience or state.global_step == state.max_steps:
            return False
        self.audience.note(
            f"ending at step {state.global_step} of {state.max_steps}: {worse} evaluations without a better one"
        )
        return True


def _checkpoint(args: TrainingArguments, step: int) -> Path:
    return Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{step}")
