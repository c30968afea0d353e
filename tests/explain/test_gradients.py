"""Integrated gradients are those of the definition."""

import pytest
import torch
from testbed import make_batch, make_student

from adtp_export.explain.gradients import answer_score, integrated_gradients, token_attribution


@pytest.fixture(scope="module")
def dense():
    return make_student([], initializer_range=0.2).double()


BATCH = make_batch([5, 3], 5)
LIVE = BATCH["attention_mask"].bool()


def attribute(model, steps, **options):
    embeddings = model.get_input_embeddings()
    return integrated_gradients(lambda: model(**BATCH).logits, embeddings, steps, log_odds, **options)


def log_odds(answer, whole):
    return answer_score(answer, whole.argmax(1))


def test_one_step_is_gradient_times_input(dense):
    embedded = dense.get_input_embeddings()(BATCH["input_ids"]).requires_grad_()
    handle = dense.get_input_embeddings().register_forward_hook(lambda *arguments: embedded)
    logits = dense(**BATCH).logits
    handle.remove()
    answer = logits.argmax(1)
    margin = logits.gather(1, answer[:, None]) - logits.gather(1, 1 - answer[:, None])
    (gradient,) = torch.autograd.grad(margin.sum(), embedded)
    same_logits, attribution = attribute(dense, 1)
    torch.testing.assert_close(same_logits, logits)
    torch.testing.assert_close(attribution, embedded * gradient)


def test_many_steps_sum_to_the_difference_from_the_baseline(dense):
    """Completeness (Sundararajan et al. 2017, proposition 1), which a wrong path, factor or baseline breaks."""
    logits, _ = attribute(dense, 1)
    classes = logits.argmax(1)
    handle = dense.get_input_embeddings().register_forward_hook(lambda m, a, output: output * 0)
    missing = answer_score(logits, classes) - answer_score(dense(**BATCH).logits, classes)
    handle.remove()
    errors = []
    for steps in (8, 64):
        total = attribute(dense, steps)[1].sum((1, 2))
        errors.append((total - missing).abs().max().item())
    assert errors[1] < errors[0] / 4  # a Riemann sum: the error falls with the number of steps
    assert errors[1] < 0.1 * missing.abs().max().item()


def test_the_hook_is_gone_after_a_failure(dense):
    def fail():
        raise RuntimeError

    embeddings = dense.get_input_embeddings()
    with pytest.raises(RuntimeError):
        integrated_gradients(fail, embeddings, 1, log_odds)
    assert not embeddings._forward_hooks


def test_score_of_three_classes_is_the_log_odds():
    logits = torch.tensor([[1.0, 2.0, 0.5]])
    probability = logits.softmax(1)[0, 1]
    torch.testing.assert_close(answer_score(logits, torch.tensor([1]))[0], (probability / (1 - probability)).log())


def test_token_attribution_has_length_one_and_forgets_padding_and_small_dimensions():
    attribution = torch.randn(2, 5, 8)
    rows = token_attribution(attribution, LIVE)
    torch.testing.assert_close(rows.square().sum(1), torch.ones(2))
    assert (rows[~LIVE] == 0).all()
    largest = attribution.abs().max(-1).values * LIVE
    expected = largest / largest.square().sum(1, keepdim=True).sqrt()
    torch.testing.assert_close(token_attribution(attribution, LIVE, dimensions=1), expected)


def test_score_of_a_value_is_the_value():
    logits = torch.tensor([[1.5], [-2.0]])
    torch.testing.assert_close(answer_score(logits, torch.tensor([0, 0])), logits[:, 0])
