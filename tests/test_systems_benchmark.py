"""Scripts of the comparison of pruning systems: which runs are left, and what is rendered of records that are not whole."""

import json
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.harness import forced
from benchmarks.pruning import flops_to_time as systems
from benchmarks.pruning import importance, train
from benchmarks.render import pruning


@pytest.fixture(scope="module")
def trained():
    return vars(train)


@pytest.fixture(scope="module")
def render():
    return vars(pruning)


def row(method="ltp", budget=0.4, seed=0, accuracy=0.8, **more):
    told = {"device": {"model": "a CPU", "cores": 2}, "versions": {"onnxruntime": "1", "torch": "2"}}
    learned = {"flops": budget - 0.01, "accuracy": accuracy, "teacher_accuracy": 0.9, "retention": {"0.ffn": 0.3}}
    sizes = {"tokens": 25.0, "rows": {"train": 2000, "dev": 160, "test": 1500}}
    return {"dataset": "sst2", "method": method, "budget": budget, "seed": seed, **learned, **sizes, **told, **more}


def write(folder, name, rows):
    (folder / f"systems-{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))


def test_recorded_runs_are_not_run_again(trained):
    runs = list(trained["queue"]())
    assert len(set(runs)) == len(runs)
    assert len({run.folder for run in runs}) == len(runs)
    done = [json.loads(json.dumps({**run._asdict(), "answers": "01"})) for run in runs[:4]]
    assert trained["left"](done) == runs[4:]
    earlier = {"dataset": "sst2", "method": "top", "budget": 0.4, "seed": 0}  # without answers, and of no named sites
    assert trained["left"]([*done, earlier]) == runs[4:]
    assert trained["Run"].of(earlier) == trained["Run"]("sst2", "top", 0.4, 0)


def test_what_stands_before_a_stop_has_all_seeds(trained):
    runs = list(trained["queue"]())
    seeds = len(trained["SEEDS"])
    for begin in range(0, len(runs), seeds):
        block = runs[begin : begin + seeds]
        assert len({(*run[:3], run.sites) for run in block}) == 1
        assert {run.seed for run in block} == set(trained["SEEDS"])
    assert {run.method for run in runs[:9]} == set(trained["PAPERS"])


def test_all_students_of_a_data_set_differ_in_method_budget_and_seed_alone(trained):
    """And in sites where they are told to, or where a method cannot cut at the first one."""
    for dataset in trained["DATA"]:
        runs = [run for run in trained["queue"]() if run.dataset == dataset]
        assert {run.settings["layers"] for run in runs if run.method == "layers"} == {6, 4, 3, 2}
        cuts = {(run.method, run.settings.get("prune_sites")) for run in runs if run.sites == "equal"}
        later = {("top", "1.attention"), ("transkimmer", "1.attention"), ("layers", None)}
        assert {cut for cut in cuts if cut[1] != "0.ffn"} == later
        assert {run.method for run in runs if "prune_sites" not in run.settings} == {*trained["HAVE_OWN"], "layers"}
        settings = [run.settings for run in runs]
        own = ("method", "attribution", "flops", "layers", "prune_sites", "seed")
        assert len({json.dumps({n: v for n, v in one.items() if n not in own}) for one in settings}) == 1


def test_a_table_of_seeds(render, tmp_path):
    unfinished = row(budget=0.6)
    write(tmp_path, "trained", [*(row(seed=s, accuracy=a) for s, a in enumerate((0.80, 0.82, 0.87))), unfinished])
    write(tmp_path, "exported", [row(seed=0, status="verified"), row(seed=1, status="failed")])
    told = render["render_systems"](tmp_path / "systems-trained.jsonl", "sst2")
    assert "| LTP | 40% | 39.0% | 83.0 (80.0 to 87.0) | -7.0 |  | 1 of 3 |  |  |" in told
    assert "60%" not in told
    assert "systems-sst2-flops.svg" in told
    assert "systems-sst2-speedup.svg" not in told
    with pytest.raises(KeyError):
        render["render_systems"](tmp_path / "systems-trained.jsonl", "20news")


def test_points_against_adtp_come_from_the_answers_to_the_same_rows(render, tmp_path):
    """At the same budget, or at the next lower one that AD-TP has."""
    said = {"adtp": "0101", "ltp": "0100", "layers": "1010"}
    rows = [row(name, 0.4, s) | {"answers": answers} for name, answers in said.items() for s in (0, 1)]
    rows += [row("layers", 0.5, s) | {"answers": "0111"} for s in (0, 1)]
    write(tmp_path, "trained", rows)
    write(tmp_path, "rows", [{"dataset": "sst2", "labels": "0101", "groups": [0, 1, 2, 3]}])
    lines = [line.split(" | ") for line in render["trained"](tmp_path, "sst2").splitlines()]
    found = {(line[0].removeprefix("| "), line[1]): line[5] for line in lines if len(line) > 5}
    assert found["AD-TP", "40%"] == ""
    assert found["LTP", "40%"].startswith("-25.0 (")
    assert found["fewer layers", "40%"].startswith("-100.0 (")
    assert found["fewer layers", "50%"].startswith("-25.0 (")


def test_own_sites_have_a_row_of_their_own(render, tmp_path):
    write(
        tmp_path,
        "trained",
        [row(), row(sites="equal", seed=1), *(row(sites="own", seed=s) for s in (0, 1)), row("layers")],
    )
    told = render["trained"](tmp_path, "sst2")
    assert "| LTP | 40% |" in told
    assert "| LTP, own sites | 40% |" in told


def test_a_measured_speed_adds_its_columns_and_its_plot(render, tmp_path):
    rows = [row(method, budget, seed) for method in ("adtp", "ltp") for budget in (0.4, 0.6) for seed in (0, 1, 2)]
    versus = {name: {"speedup": 1.5, "margin": 0.25} for name in ("packed", "padded")}
    write(tmp_path, "trained", rows)
    write(tmp_path, "latency", [{**one, "vs": versus} for one in rows if one["seed"] == 0 and one["budget"] == 0.4])
    told = render["render_systems"](tmp_path / "systems-trained.jsonl", "sst2")
    assert told.count("1.50x ± 0.25 | 1.50x ± 0.25") == 2
    assert "systems-sst2-speedup.svg" in told
    drawn = render["plots"](tmp_path)
    assert set(drawn) == {"docs/systems-sst2-flops.svg", "docs/systems-sst2-speedup.svg"}
    for name, dots in (("docs/systems-sst2-flops.svg", 4), ("docs/systems-sst2-speedup.svg", 2)):
        svg = ElementTree.fromstring(drawn[name])
        tips = list(svg.iter("{http://www.w3.org/2000/svg}title"))
        assert len(tips) == dots


def test_a_figure_that_holds_padding_stands_in_its_own_table(render, tmp_path):
    told = {"paper_reduction": 2.1, "padding": 1.0, "forced": 2.1, "speedup": 2.0, "margin": 0.1, "flops_ratio": 2.1}
    told |= {"ms": 10.0, "dense_ms": 20.0, "weights_ms": 1.1, "dense_weights_ms": 1.0}
    told |= {"realized_fraction": 0.95, "device": row()["device"], "versions": row()["versions"]}
    rows = [
        {"system": "ltp", "workload": w, **told, "without_sums": 0.97, "without_sums_margin": 0.01}
        for w in ("8x128", "32x64")
    ]
    power = {"system": "power", "workload": "8x128", **told, "paper_reduction": 4.2, "padding": 2.0}
    write(tmp_path, "speed", [*rows, power, {**power, "forced": 4.2, "realized_fraction": 0.5}])
    path = tmp_path / "systems-speed.jsonl"
    realized, whole = (render["render_systems"](path, part) for part in ("realized", "whole"))
    first = 20 / (19 / 2.1 + 1.1) / 2.1
    assert f"| PoWER-BERT | 4.2x | 2.0x | 2.1x | 8x128 | 10 | 2.00x ± 0.10 | 2.10x | 0.95 | {first:.2f} |" in realized
    assert realized.count("| LTP |") == 2
    assert realized.count("| PoWER-BERT |") == 1
    assert "| PoWER-BERT | 4.2x | 2.0x | 4.2x | 8x128 | 10 | 2.00x ± 0.10 | 2.10x | 0.50 |" in whole
    assert "LTP" not in whole
    sums = render["render_systems"](path, "sums")
    assert "| LTP | +3.0% ± 1.0 | +3.0% ± 1.0 |" in sums
    assert "PoWER" not in sums


def test_layers_that_score_tokens_count_in_what_is_forced(monkeypatch):
    """A Transkimmer predictor of width 256 has 2 * (256 * 256 + 256 * 2) FLOPs a token."""
    monkeypatch.setattr(forced, "SHAPE", "bert-mini")
    batch = {"input_ids": torch.ones(2, 64, dtype=torch.int64).numpy()}
    batch["attention_mask"] = batch["input_ids"].copy()
    batch["attention_mask"][1, 40:] = 0
    (skimmer,) = (system for system in systems.SYSTEMS if system.name == "transkimmer")
    student = systems.forced_student(skimmer, 3.0, batch, column=False)
    shape, lengths = systems.architecture().shape, batch["attention_mask"].sum(1)
    shares = systems.shares(student, skimmer.sites, 3.0, lengths)
    alive = [lengths, *((lengths * share).round() for share in shares)]
    scores = 2 * (256 * 256 + 256 * 2) * sum(tokens.sum() for tokens in alive[:-1])
    assert systems.score_flops(student, alive) == scores
    whole, encoder = (systems.encoder_flops(shape, *one, True) for one in (([lengths], []), (alive, skimmer.sites)))
    assert whole / (encoder + scores) == pytest.approx(3.0, rel=0.05)  # tokens are whole ones


def test_curves_of_what_a_teacher_answers(render, tmp_path):
    told = {
        "dataset": "sst2",
        "retention": [0.0, 0.5, 1.0],
        "rows": 10,
        "device": row()["device"],
        "versions": row()["versions"],
    }
    kinds = {"gradient": [0.5, 0.9, 0.9], "random, seed 0": [0.5, 0.6, 0.9], "random, seed 1": [0.5, 0.8, 0.9]}
    write(tmp_path, "importance", [{**told, "kind": kind, "accuracy": values} for kind, values in kinds.items()])
    told = render["render_systems"](tmp_path / "systems-importance.jsonl", "sst2")
    assert "| random | 50.0 | 70.0 | 90.0 |" in told
    assert list(render["plots"](tmp_path)) == ["docs/systems-sst2-importance.svg"]


def test_tokens_of_most_worth_stay_at_their_own_positions():
    right = importance.right
    seen = {}

    class Teacher(torch.nn.Module):
        def forward(self, input_ids, attention_mask, position_ids):
            seen.update(ids=input_ids, mask=attention_mask, positions=position_ids)
            return type("Answer", (), {"logits": torch.tensor([[0.0, 1.0], [1.0, 0.0]])})

    batch = {
        "input_ids": torch.tensor([[9, 5, 6, 7], [9, 8, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
    }
    worth = torch.tensor([[0.0, 1.0, 3.0, 2.0], [0.0, 1.0, 9.0, 9.0]])
    assert right(Teacher(), batch, torch.tensor([1, 1]), worth, 0.75) == 1
    kept = [
        sorted(zip(p[m == 1].tolist(), i[m == 1].tolist()))
        for p, i, m in zip(*map(seen.get, ("positions", "ids", "mask")))
    ]
    assert kept == [[(0, 9), (2, 6), (3, 7)], [(0, 9), (1, 8)]]
    right(Teacher(), batch, torch.tensor([1, 1]), worth, 0.0)
    assert seen["ids"].tolist() == [[9], [9]]


def test_answers_are_written_as_one_character_each(trained):
    assert trained["classes"]([0, 9, 10, 19]) == "09aj"
