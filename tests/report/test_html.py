"""`report.html`: self-contained, true to the manifest, and rendered by a browser without complaints."""

import dataclasses
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from testbed import as_numpy, make_batch, make_student

from adtp_export.artifacts.records import Manifest, Target
from adtp_export.explain.records import BY_CHANCE, FLOWED, HELD, ORDER, POSSIBLE, Explanation, TokenView, Views
from adtp_export.report import html
from adtp_export.verify.oracle import run_oracle
from adtp_export.verify.views import Labels, make_views

VOID = {"meta", "link", "rect", "line", "br"}


class Reader(HTMLParser):
    """Collects text and checks that every tag is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.classes, self.text = [], [], ""

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        self.classes.append(dict(attributes).get("class") or "")

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read(document):
    reader = Reader()
    reader.feed(document)
    assert reader.open == []
    return reader


VIEW = TokenView(
    tokens=(" [CLS]", " a", " <b>", "old", " [SEP]"),
    kept_site=(2, 0, 2, 1, 0),
    scores={"1.attention": (0.5, -1.0, 2.0, 1.0, -3.0), "2.ffn": (0.1, None, 1.5, -0.5, None)},
    answer="positive 98.0%",
)


@pytest.fixture(scope="module")
def manifest(exported):
    return Manifest.read(exported)


def test_it_says_what_the_manifest_says(exported, manifest):
    reader = read((exported / "report.html").read_text())
    for name, target in manifest.targets.items():
        assert name in reader.text
        assert reader.classes.count(f"status {target.status}") >= 1
    assert list(manifest.retention) == ["1.attention", "2.ffn"]
    for site, figures in manifest.retention.items():
        assert f"{site}: {figures['mean_ratio']:.0%} of what arrives is kept" in reader.text
    assert "superb" in reader.text  # one of the built-in sentences


def test_it_needs_nothing_else(exported):
    document = (exported / "report.html").read_text()
    assert not re.search(r"<script|\ssrc=|https?://|@import|url\(", document)


def test_tokens_are_marked_and_escaped(manifest):
    reader = read(html.render(manifest, Views((VIEW,), {}, 0.4)))
    kinds = [c for c in reader.classes if c.startswith("t ") and "legend" not in c][3:]  # after the legend
    assert kinds == ["t kept", "t d0", "t kept", "t d1 glued", "t d0"]
    assert "a <b>old" in reader.text
    assert "positive 98.0% · 2 of 5 tokens" in reader.text
    document = html.render(manifest, Views((VIEW,), {}, 0.4))
    assert "data-tip='1.attention: +1.00; 2.ffn: -0.50; dropped at 2.ffn'" in document
    assert "data-tip='1.attention: -1.00; dropped at 1.attention'" in document


def test_what_single_texts_showed_stays_in_a_report_that_is_written_without_them(manifest):
    once = html.render(manifest, Views((VIEW,), dict.fromkeys(manifest.retention, (1, 0, 3)), 0.4))
    again = html.render(manifest, None, once)
    sections = re.findall(r"<section>.*?</section>", once, re.DOTALL)
    assert len(sections) > 3
    assert re.findall(r"<section>.*?</section>", again, re.DOTALL) == sections
    assert "class='t kept'" in again
    assert "class='t kept'" not in html.render(manifest, Views((), {}, 0.4), once)
    assert html.render(manifest, None, "") == html.render(manifest, None, "no report at all")


def test_what_an_answer_rests_on_stands_above_what_was_kept(manifest):
    explained = Explanation(
        kept_site=VIEW.kept_site,
        attribution=(0.1, 0.0, 0.5, 0.15, 0.25),
        flow=(None, 0.8, None, 0.4, 0.9),
        flowed=(None, 0.25, None, 0.5, 0.0),
        figures={HELD: 0.5 / 0.9, POSSIBLE: 0.5 / 0.9, BY_CHANCE: 0.25, ORDER: 0.4, FLOWED: 0.25},
    )
    view = dataclasses.replace(VIEW, explained=explained)
    document = html.render(manifest, Views((view,), {}, 0.4))
    upper, lower = document.split("<figure>")[1].split("<div class='text")[1:]
    assert re.findall(r"--a:(\d+)%", upper) == ["20", "0", "100", "30", "50"]
    assert [re.sub("<.*?>", "", row.split(">", 1)[1]).split() for row in (upper, lower.split("<figcaption>")[0])] == [
        ["[CLS]", "a", "&lt;b&gt;old", "[SEP]"]
    ] * 2
    assert "data-tip='1.attention: -1.00; dropped at 1.attention; 25% of its flow, 0.80, had passed'" in lower
    assert "kept tokens hold 56% of the attribution (at most 56%, by chance 25%)" in lower
    assert "Spearman of order and attribution +0.40; 25% of the flow from dropped tokens had passed" in document
    assert "class='t a'" not in html.render(manifest, Views((VIEW,), {}, 0.4))


def test_without_verification(manifest):
    target = Target(file="model.onnx", status="unverified", attention="decomposed")
    bare = dataclasses.replace(manifest, verification={}, retention={}, targets={"onnxruntime-cpu-fp32": target})
    reader = read(html.render(bare))
    assert reader.classes.count("status unverified") == 1
    assert "Compared with" not in reader.text


def test_times_of_different_batches_stand_apart(manifest):
    """Only targets that took turns can be compared."""
    timed = [
        {"p50_ms": 1.0, "timed_on": "8x32"},
        {"p50_ms": 2.0, "timed_on": "8x32"},
        {"p50_ms": 3.0, "timed_on": "1x64"},
    ]
    target = manifest.targets["onnxruntime-cpu-fp32"]
    targets = {f"t{i}": dataclasses.replace(target, details=details) for i, details in enumerate(timed)}
    text = read(html.render(dataclasses.replace(manifest, targets=targets))).text
    assert re.findall(r"one batch of (\w+) tokens|t\d\d\.\d ms", text.split("Precisions on")[1]) == [
        "8x32",
        "",
        "",
        "1x64",
        "",
    ]


def bench(p50):
    versus = {"packed-dense-4": {"speedup": 2.0, "flops_ratio": 2.2, "realized_fraction": 0.91}}
    row = {"workload": "1x32", "p50_ms": p50, "p90_ms": p50 + 1, "p99_ms": p50 + 2}
    rows = [{**row, "contender": "student", "vs": versus}, {**row, "contender": "packed-dense-4", "vs": {}}]
    return {
        "command": "adtp-bench x",
        "device": {"model": "a <CPU>", "cores": 2},
        "retention": "learned",
        "results": rows,
    }


def test_latencies_replace_older_ones(manifest):
    once = html.with_bench(html.render(manifest), bench(3.0))
    assert "packed-dense-43.0 ms, 2.0x the student's" in read(once).text
    assert "a <CPU>, 2 cores" in read(once).text
    assert html.with_bench(once, bench(7.0)) == html.with_bench(html.render(manifest), bench(7.0))
    assert html.render(manifest, earlier=once) == once
    assert html.bench_of(html.render(manifest)) == html.bench_of("<html></html>") == ""
    with pytest.raises(ValueError, match="no <!-- bench --> in the report"):
        html.with_bench("<html></html>", bench(3.0))


def test_sweeps_and_profiles_are_drawn(manifest):
    point = {"vs": {"packed-dense-4": {"speedup": 2.5}}}
    sweep = {"workload": "8x128", "baseline": "packed-dense-4", "retention": [0.2, 1.0], "break_even": 0.93}
    product = {
        "name": "qkv",
        "batch": 1,
        "m": 9,
        "n": 96,
        "k": 32,
        "count": 4,
        "ms": 0.5,
        "gflops": 40.0,
        "intensity": 3.0,
    }
    profile = {"workload": "8x128", "run_ms": 2.0, "accounted": 0.97, "product_share": 0.8, "weights_ms": 0.1}
    profile |= {"shares": {"Gemm": 0.8, "Gelu": 0.1}, "products": [product, {**product, "ms": 0.001, "gflops": 0.1}]}
    document = bench(3.0) | {
        "sweeps": [sweep | {"points": [point, point]}],
        "profiles": [profile],
        "peaks": {"gflops": 100.0, "gigabytes_per_s": 20.0, "runtime": "ONNX Runtime"},
    }
    reader = read(html.with_bench(html.render(manifest), document))
    assert "Break-even retention: 8x128: 93%" in reader.text
    assert "8x128: 20% kept, 2.50x" in reader.text
    assert "8x128, qkv: 4 x 1 x (9, 32) @ (32, 96), 40 GFLOP/s, 25.0% of the run" in reader.text
    assert reader.text.count("GFLOP/s,") == 2  # the line told of, and one circle: the other product is too small
    assert "100 GFLOP/s, in a large matrix product of ONNX Runtime, and 20 GB/s from memory" in reader.text
    assert "97.0% of 2.0 ms accounted for, 80.0% matrix products" in reader.text


def test_views_are_the_oracle_s(demo):
    from adtp_export.model.checkpoint import load_checkpoint

    student = make_student(["1.attention", "2.ffn"])
    oracle = run_oracle(student, [as_numpy(make_batch([9, 32, 1], 32)), as_numpy(make_batch([5, 20], 20, seed=1))])
    views = make_views(oracle, load_checkpoint(demo).tokenizer, Labels({0: "no", 1: "yes"}))
    assert [len(view.tokens) for view in views.texts] == [9, 32, 5, 20]  # a text of one token shows nothing
    for i, site in enumerate(oracle.sites):
        assert sum(views.retention[site]) == 5
        for view in views.texts:
            alive = [kept >= i for kept in view.kept_site]
            assert [score is not None for score in view.scores[site]] == [False, *alive[1:]]  # the first always stays
    assert all(view.kept_site[0] == 2 for view in views.texts)
    assert all(re.fullmatch(r"(no|yes) \d+\.\d%", view.answer) for view in views.texts)
    assert 0 < views.survivors < 1


@pytest.fixture
def browser():
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("neither chromium nor google-chrome is installed")
    return found


@pytest.mark.parametrize("width", [390, 1100])
def test_a_browser_renders_it(exported, tmp_path, browser, width):
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--window-size={width},1200")
    page = (exported / "report.html").as_uri()
    result = subprocess.run(
        [browser, *options, f"--user-data-dir={tmp_path}", f"--screenshot={tmp_path / 'page.png'}", page],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0
    assert "CONSOLE" not in result.stderr
    assert (tmp_path / "page.png").stat().st_size > 20_000
