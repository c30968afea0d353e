"""How far a precision is from fp64 on given weights and rows, and the rule of every verdict that follows from it.

A target may be off by a small multiple M of what PyTorch itself is off in the same precision, on the same rows and weights::

    |target - fp64| <= M * max over draws of |PyTorch - fp64|

In full: let ``x_r`` be what fp64 says of row r, and ``x_r0`` what the precision says. ``x_r1 ... x_rD`` are more draws of the same
rounding: further runs in which each input v of each matrix product becomes ``v (1 + t)``, with t drawn evenly from ``[-a, a]``
(Monte Carlo arithmetic: Parker, 1997). In fp32 a is eps, as far as two roundings go: of a product, and of a sum. In 16 bits
it is eps / 2, because sums are wider there. Then::

    d_rk = max |x_rk - x_r|                             over the values of a row
    s_r  = sqrt((d_r1^2 + ... + d_rD^2) / D)            0 where D = 0
    e    = max(max_r d_r0, max_r s_r, eps max |x|)      at least one rounding of the largest value
    D    = min(8, ceil(64 / rows) - 1)

    |target - x_r| <= M e                               M = 8 in fp32, 3 in lower precisions

The last term of e keeps rows whose error happens to be tiny from making a tolerance that no kernel can meet. Where fp32 itself keeps
other tokens than fp64, x_r is its answer.

The kept tokens follow the same rule. Each site makes two decisions: how many tokens stay, and which. The error e of a decision is
that of the scores behind it, and its margin m_r is how far apart, in fp64, the scores are that it turns on. Where row r keeps other
tokens than the oracle, take the first site at which it does, and the decision that came out otherwise there::

    m_r < M e      the flip is excused, and listed: either answer lies within rounding
    m_r >= M e     the target is wrong

Besides, scores that are off by less than M e have to explain how many tokens stayed, and all that fell or stayed otherwise
(`verify.flips`): a near-tie excuses the ratios, or the tokens at the border, that are near it, and no others.

After an excused flip the target computes another network, as right as the oracle's, so its row is not compared further.
`verify.parity` applies both inequalities to a target; `verify.oracle` has x, e and m.

A single draw proves nothing: where a sum cancels, or a run happens to round as fp64 does, ``d_r0`` is near 0 though another
kernel's error is not. Many rows are many draws by themselves, so 64 of them need no further ones. For one row with one value,
``d / s`` has Student's t-distribution with D degrees of freedom: beyond 8 lie 4 of 100,000 kernels that err as much as the draws.

A row that parts from fp64 at one site computes another network from there on. Of such a run, scores count up to that site.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..model.padded import Decision
from ..model.positions import to_precision
from ..model.predictions import Decoder

MULTIPLE = 8.0
"""M in fp32. Kernels that add up in another order err up to 3 times as much in one product: on 3,072 terms 8.5 eps one
after the other, and 3 eps in PyTorch's blocks. The rest is room for functions such as tanh and erf, whose approximations differ."""

TYPED_MULTIPLE = 3.0
"""M in lower precisions, where weights and states are rounded alike in PyTorch and in a target, and only the order
of sums differs. Where attention operators may round to bf16, it covers that, too."""


def multiple_of(precision: str) -> float:
    """Return M of a precision."""
    return MULTIPLE if precision == "fp32" else TYPED_MULTIPLE


ENOUGH_ROWS = 64
"""Rows times draws from which on no further ones are made."""

MAX_DRAWS = 8


@dataclass(frozen=True)
class Answer:
    """What a padded student says of a batch: outputs by name, zeros for padding; kept_site ``(B, S)``; a decision per site."""

    outputs: Mapping[str, Tensor]
    kept_site: Tensor
    decisions: tuple[Decision, ...]


@dataclass(frozen=True)
class Errors:
    """Errors e on one batch: of outputs, by name; of decisions, ``(sites, 2)``: how many tokens stay, and which."""

    outputs: Mapping[str, float]
    decisions: np.ndarray


def draws_for(rows: int) -> int:
    """Return D, how many further runs so many rows need."""
    return min(MAX_DRAWS, -(-ENOUGH_ROWS // rows) - 1) if rows < ENOUGH_ROWS else 0


def errors(run: Callable[[], Answer], student: nn.Module, exact: Answer, draws: int) -> tuple[Answer, Errors]:
    """Run a batch in the precision that is judged, and say how far that is from fp64.

    Args:
        run: runs `student` on the batch.
        draws: D.

    Returns:
        The plain run's answer, and the errors.
    """
    plain = run()
    first = _distances(plain, exact)
    further = []
    for number in range(draws):
        with rounded_anew(student, number):
            further.append(_distances(run(), exact))
    unit = torch.finfo(next(iter(plain.outputs.values())).dtype).eps
    sizes = [unit * decision.rule.sizes(decision.live) for decision in exact.decisions]
    by_row = joined(first.decisions, [each.decisions for each in further])
    floor = np.array([size.numpy() for size in sizes]).reshape(len(sizes), 2)
    return plain, Errors(
        outputs={
            name: max(
                float(joined(first.outputs[name], [each.outputs[name] for each in further]).max(initial=0)),
                unit * float(exact.outputs[name].abs().max()),
            )
            for name in exact.outputs
        },
        decisions=np.maximum(by_row.max(2, initial=0), floor),
    )


@torch.no_grad()
def errors_of_network(
    network: nn.Module, inputs: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[np.ndarray, float]:
    """Run a network in fp64 and in a precision.

    Args:
        network: in fp32, from one tensor to one, rows first in both.

    Returns:
        What fp64 says, and the error e of a value in the precision.
    """
    exact = copy.deepcopy(network).double()(inputs.double())
    rounded, inputs = copy.deepcopy(network), inputs.to(dtype)
    to_precision(rounded, dtype)
    runs = [rounded(inputs)]
    for seed in range(draws_for(len(inputs))):
        with rounded_anew(rounded, seed):
            runs.append(rounded(inputs))
    first, *further = (_infinite((run.double() - exact).abs().flatten(1).amax(1)).numpy() for run in runs)
    unit = torch.finfo(dtype).eps
    return exact.numpy(), max(float(joined(first, further).max()), unit * float(exact.abs().max()))


@contextlib.contextmanager
def rounded_anew(student: nn.Module, seed: int) -> Iterator[None]:
    """Have each input of each product with weights rounded once more, at random."""
    generator = torch.Generator().manual_seed(seed)

    def perturb(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *others = inputs
        farthest = torch.finfo(x.dtype).eps / (2 if x.itemsize == 2 else 1)
        moves = torch.rand(x.shape, generator=generator).sub_(0.5).mul_(2 * farthest)
        return (torch.addcmul(x, x, moves.to(x.dtype)), *others)

    products = [module for module in student.modules() if isinstance(module, (nn.Linear, nn.Conv2d, Decoder))]
    hooks = [module.register_forward_pre_hook(perturb, prepend=True) for module in products]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class _Distances:
    """d of one run: of outputs ``(B,)`` by name, and of decisions ``(sites, 2, B)``; NaN where a row says nothing."""

    outputs: Mapping[str, np.ndarray]
    decisions: np.ndarray


def _distances(rounded: Answer, exact: Answer) -> _Distances:
    sites, rows = len(exact.decisions), len(exact.kept_site)
    a, b = rounded.kept_site, exact.kept_site
    # The site at which a row parts: there, scores still compare.
    parted = torch.where(a != b, torch.minimum(a, b), sites).amin(1)
    decisions = torch.zeros(sites, 2, rows, dtype=torch.float64)
    for i, (low, high) in enumerate(zip(rounded.decisions, exact.decisions)):
        decisions[i] = _infinite(low.rule.errors(high.rule, high.live)).masked_fill(parted < i, torch.nan)
    outputs = {}
    for name, values in exact.outputs.items():
        off = _infinite((rounded.outputs[name].double() - values).abs().flatten(1).amax(1))
        outputs[name] = off.masked_fill(parted < sites, torch.nan).numpy()
    return _Distances(outputs, decisions.numpy())


def _infinite(off: Tensor) -> Tensor:
    """Take what is no number for infinitely far."""
    return off.nan_to_num(nan=torch.inf, posinf=torch.inf)


def joined(first: np.ndarray, further: Sequence[np.ndarray]) -> np.ndarray:
    """Return ``max(d_r0, s_r)`` for each row, 0 where none of its runs says anything: NaN is a run that says nothing of a row."""
    first = np.where(np.isnan(first), 0, first)
    if not further:
        return first
    squares = np.square(further)
    told = ~np.isnan(squares)
    mean = np.where(told, squares, 0).sum(0) / np.maximum(told.sum(0), 1)
    return np.maximum(first, np.sqrt(mean))
