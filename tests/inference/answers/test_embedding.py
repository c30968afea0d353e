import numpy as np
import pytest

from adtp_export.inference.answers import embedding, vectors

RANDOM = np.random.default_rng(0)
VECTORS = RANDOM.normal(size=(6, 4)).astype(np.float32)


def turned(vector, other, share):
    """A vector on the way from one to another, by a share of the angle between them."""
    a, b = (v / np.linalg.norm(v) for v in (vector, other))
    angle = np.arccos(a @ b)
    return (np.sin((1 - share) * angle) * a + np.sin(share * angle) * b) / np.sin(angle)


@pytest.mark.parametrize(("share", "agrees"), [(0.0, True), (0.49, True), (0.51, False)])
def test_a_vector_agrees_up_to_half_the_way_to_its_neighbour(share, agrees):
    units = VECTORS / np.linalg.norm(VECTORS, axis=1, keepdims=True)
    near = int(np.argsort(-(units @ units[0]))[1])
    moved = VECTORS.copy()
    moved[0] = 3 * turned(VECTORS[0], VECTORS[near], share)  # length changes nothing
    assert embedding.agreement(moved, VECTORS).tolist() == [agrees, *[True] * 5]


def test_the_same_text_twice_is_no_neighbour():
    twice = np.concatenate([VECTORS[:1], VECTORS[:1]])
    assert embedding.agreement(twice + np.float32(1e-3), twice).all()
    assert embedding.agreement(VECTORS[:1], VECTORS[:1]).all()
    assert not embedding.agreement(-VECTORS[:1], VECTORS[:1]).any()


def test_cosines():
    a, b = np.array([[1, 0], [1, 1], [0, 0]], np.float32), np.array([[0, 2], [3, 0], [1, 0]], np.float32)
    assert embedding.cosines(a, b) == pytest.approx([0, 0.5**0.5, 0])


def test_two_sparse_vectors_without_weights_are_the_same():
    without, other = VECTORS.copy(), VECTORS.copy()
    without[2], other[2] = 0, 1
    for found, cosine in ((without, 1), (other, 0)):
        assert embedding.nearness(found, without).min() == pytest.approx(cosine)
        assert embedding.agreement(found, without).all() == bool(cosine)


def test_similarity_is_kept_where_pairs_stay_in_order():
    assert embedding.similarity_kept(2 * VECTORS, VECTORS) == pytest.approx(1)
    assert embedding.similarity_kept(VECTORS[::-1], VECTORS) < 0.9
    assert embedding.similarity_kept(VECTORS[:2], VECTORS[1:3]) == 1


def test_pairs_that_are_equally_near_have_no_order():
    """Of sparse vectors without a common token, and of one text that is there three times."""
    apart, same = np.eye(4, dtype=np.float32), np.tile(VECTORS[:1], (3, 1))
    assert [embedding.similarity_kept(found, found) for found in (apart, same)] == [1, 1]
    assert vectors.similarity_kept([apart[:1]] * 3, [apart[:1]] * 3) == 1
    rounded = np.nextafter(
        np.tile(VECTORS[:1], (6, 1)), np.float32(9) * (-1) ** np.arange(6, dtype=np.float32)[:, None]
    )
    assert embedding.similarity_kept(rounded[::-1], rounded) == 1


def test_quality_is_correlation():
    assert embedding.quality(np.array([0.1, 0.2, 0.9]), np.array([0, 1, 5])) == pytest.approx(
        {"spearman": 1, "pearson": np.corrcoef([0.1, 0.2, 0.9], [0, 1, 5])[0, 1]}
    )
