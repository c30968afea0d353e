"""Render the records of `adtp-bench` and of the scripts in `benchmarks/cpu`."""

from __future__ import annotations

from typing import Any

from adtp_export.benchmarking.profile import PRODUCTS
from benchmarks.cpu.contenders import OURS
from benchmarks.harness.forced import FULL, LAYERS, SHAPE
from benchmarks.harness.records import RECORDS, read_document, read_lines
from benchmarks.render.pruning import if_weights_are_read_first
from benchmarks.render.tables import per_second, place, quoted, table

PRECOMPUTED, SPLIT, OPERATORS = "student-precomputed", "student-sorted", "student-plugin"
USUAL = f"padded-dense-{FULL}"
FACTORS = {
    "fewer layers": (USUAL, f"padded-dense-{LAYERS}"),
    "no padding": (f"padded-dense-{LAYERS}", f"packed-dense-{LAYERS}"),
    "fewer tokens": (f"packed-dense-{LAYERS}", "student"),
    "compiled attention": ("student", OPERATORS),
}
"""What of the front page's speedup comes from where: the time of the first over that of the second."""
BEST_PEERS = {
    f"openvino-bf16-dense-{FULL}": "OpenVINO, bf16",
    f"ctranslate2-int8-dense-{FULL}": "CTranslate2, int8",
} | {f"llamacpp-{precision}-dense-{FULL}": f"llama.cpp, {precision}" for precision in ("f32", "bf16", "q8_0")}

GPU_RECORD = RECORDS / "gpu-nvidia-h100-80gb-hbm3-bert-base-6-ort-cuda-fp16.json"

Rows = dict[tuple[str, str], dict[str, Any]]


def by_name(record: dict[str, Any]) -> tuple[Rows, list[str]]:
    """Return the rows of a record of `adtp-bench --json` by workload and contender, and the workloads in order."""
    rows = {(row["workload"], row["contender"]): row for row in record["results"]}
    return rows, list(dict.fromkeys(workload for workload, _ in rows))


def conditions(record: dict[str, Any]) -> str:
    versions, precision = record["versions"], record["results"][0]["precision"]
    where = record["device"].get("name") or place(record)
    runtime = versions.get("onnxruntime") or versions["onnxruntime-gpu"]
    return f"`{record['command']}`: retention {record['retention']}. Medians, ONNX Runtime {runtime}, {precision}, {where}."


def front(record: dict[str, Any]) -> str:
    """Return the front page's table: the speedup over BERT as usually exported, its factors, and the best peer of the same run."""
    rows, workloads = by_name(record)
    lines = []
    for workload in workloads:
        ms = {name: row["p50_ms"] for (at, name), row in rows.items() if at == workload}
        peer = min(BEST_PEERS.keys() & ms, key=ms.__getitem__, default=None)
        versus = rows[workload, OPERATORS]["vs"]
        factors = [f"{ms[slower] / ms[faster]:.1f}" for slower, faster in FACTORS.values()]
        best = f"{ms[peer]:.1f} ({BEST_PEERS[peer]})" if peer else ""
        over_best = f"**{quoted(versus[peer])}**" if peer else ""
        times = [f"{ms[USUAL]:.1f}", best, f"{ms[OPERATORS]:.1f}"]
        lines.append([workload, *times, " x ".join(factors), f"**{quoted(versus[USUAL])}**", over_best])
    heads = ["workload", "BERT as usually exported, ms", "best peer, ms", "student, ms", " x ".join(FACTORS)]
    heads += ["= speedup over the usual", "over the best peer"]
    told = (
        f"`{record['command']}`: BERT-base's width; the student has {LAYERS} layers, all others {FULL}. It computes in fp32, with "
        "attention in the package's compiled operators. BERT as usually exported is in fp32, too: PyTorch's ONNX export, with padding, in "
        f"ONNX Runtime. Retention {record['retention']}. Each contender is timed right after an untimed run of the same batch; ± is a 95% "
        "interval. 1xS is one text of S tokens, BxS B texts of S/4 to S; mixed-32 has 32 texts of 5 to 326. The gain of fewer layers is "
        f"that of the shallower model, not of the export. {place(record)}, ONNX Runtime {record['versions']['onnxruntime']}."
    )
    return "\n\n".join([table(heads, lines), told, f"{_in_lower_precisions(record)} {_accuracy()} {_on_a_gpu()}"])


LOWER_PEERS = ("OpenVINO dense bf16", "CTranslate2 dense int8")
"""Of precision-speed.json: those of `BEST_PEERS`."""
WIDE = 0.1
"""A margin that says too little, as a share of the speedup."""


def _in_lower_precisions(record: dict[str, Any]) -> str:
    """Say how much faster the table's student is in bf16 and INT8 on the same kind of processor, where that is known to within `WIDE`."""
    hardware = record["device"]["hardware"]
    timed = [shapes[SHAPE] for shapes in read_document(RECORDS / "precision-speed.json").values()]
    part = next((each for each in timed if each["device"]["hardware"] == hardware), None)
    if part is None:
        raise KeyError("precision-speed.json of this processor")
    rows = {(row["workload"], row["precision"]): row for row in part["results"]}
    ms = {which: row["p50_ms"] for which, row in rows.items()}
    lower = {"bf16": "bf16 linear with operators", "INT8": "int8 per token with operators"}
    margins = {which: row["margin"] / row["speedup"] for which, row in rows.items()}
    workloads = [
        workload
        for workload in dict.fromkeys(workload for workload, _ in rows)
        if all(margins[workload, precision] <= WIDE for precision in lower.values())
    ]
    peers = {
        workload: min(ms[workload, peer] for peer in LOWER_PEERS if (workload, peer) in ms) for workload in workloads
    }
    gains, ahead = [], []
    for name, precision in lower.items():
        own = [ms[workload, "fp32 with operators"] / ms[workload, precision] for workload in workloads]
        gains.append(f"{min(own):.1f} to {max(own):.1f} times as fast in {name}")
        over = [peers[workload] / ms[workload, precision] for workload in workloads]
        ahead.append(f"{min(over):.1f} to {max(over):.0f} times that of the student in {name}")
    return (
        f"**In lower precisions**, without calibration, such a student was {' and '.join(gains)} as in fp32 with the operators, in "
        f"[another run](docs/quantization.md#accuracy-and-speed-on-cpus) ({workloads[0]} to {workloads[-1]}). There the time of the best "
        f"peer was {' and '.join(ahead)}."
    )


def _accuracy() -> str:
    """Say what a trained student with this cut answers right."""
    trained = {row["name"]: row for row in read_lines(RECORDS / "students.jsonl")}["sst2"]
    student, teacher = trained["student"], trained["teacher"]
    return (
        f"**What the cut costs in accuracy:** a trained student with the same cut (MiniLM-L6, held-out rows of SST-2) keeps "
        f"{student['retention']['0.ffn']:.0%} of the tokens and answers {student['accuracy']:.1%} of {trained['rows']['test']:,} test "
        f"rows right; its teacher, of the same depth, {teacher['accuracy']:.1%}."
    )


def _on_a_gpu() -> str:
    """Say where the student is no faster than packed dense BERT on the H100."""
    record = read_document(GPU_RECORD)
    rows, workloads = by_name(record)
    over = {w: rows[w, "student"]["vs"][f"packed-dense-{LAYERS}"] for w in workloads}
    slow = {w: v["speedup"] for w, v in over.items() if v["speedup"] - v["margin"] < 1}
    fast = [f"{v['speedup']:.1f}x on {w}" for w, v in over.items() if w not in slow]
    return (
        "**On an H100 in fp16** (ONNX Runtime; TensorRT engines were built, not timed) the cut does not pay in small batches: the table's "
        f"student has {min(slow.values()):.2f}x to {max(slow.values()):.2f}x the speed of packed dense BERT of its depth on "
        f"{', '.join(slow)}, and {', '.join(fast) or 'nowhere more'}."
    )


def render(record: dict[str, Any]) -> str:
    """Return a record of `adtp-bench --json` as a markdown table with its conditions."""
    rows, workloads = by_name(record)
    same = next(name for name in rows[workloads[0], "student"]["vs"] if name.startswith("packed"))
    digits = 2 if "name" in record["device"] else 1
    lines = []
    for workload in workloads:
        versus = rows[workload, "student"]["vs"]
        times = [f"{rows[workload, name]['p50_ms']:.{digits}f}" for name in ("student", same, USUAL)]
        lines.append([workload, *times, quoted(versus[USUAL]), f"{versus[same]['realized_fraction']:.2f}"])
    heads = ["workload", "student, ms", f"{same}, ms", f"{USUAL}, ms", f"speedup over {USUAL}"]
    told = (
        f"{conditions(record)} Realized fraction = speedup / FLOPs reduction; *packed-dense* is the same "
        f"graph with all tokens kept, *{USUAL}* is BERT at {FULL} layers exported as usual."
    )
    return f"{table([*heads, f'realized fraction against {same}'], lines)}\n\n{told}"


def render_skewed(record: dict[str, Any]) -> str:
    """Return the ways to run skewed batches: each against the student's whole batch."""
    rows, workloads = by_name(record)
    skewed = [w for w in workloads if (w, SPLIT) in rows]
    if not skewed:
        raise KeyError(SPLIT)
    lines = []
    for name in [name for workload, name in rows if workload == skewed[0]]:
        cells = [name]
        for w in skewed:
            versus = rows[w, "student"]["vs"].get(name)
            ratio = f"{versus['speedup']:.2f} ± {versus['margin']:.2f}" if versus else ""
            realized = f"{versus['realized_fraction']:.2f}" if versus and "student" not in name else ""
            cells += [f"{rows[w, name]['p50_ms']:.0f}", ratio, realized]
        lines.append(cells)
    heads = [head for w in skewed for head in (f"{w}, ms", "times the student", "realized fraction against it")]
    return f"{table(['contender', *heads], lines)}\n\n{conditions(record)}"


def render_peers(record: dict[str, Any]) -> str:
    """Return the times of all contenders, with the fastest fp32 peer of each workload in bold."""
    rows, workloads = by_name(record)
    everywhere = [name for name in dict.fromkeys(n for _, n in rows) if all((w, name) in rows for w in workloads)]
    peers = [name for name in everywhere if "student" not in name]
    dense = [name for name in peers if name.endswith("dense-12") and not name.startswith("packed")]
    best = {
        w: min((n for n in dense if rows[w, n]["precision"] == "fp32"), key=lambda n: rows[w, n]["p50_ms"])
        for w in workloads
    }
    lines = []
    for name in ("student", OPERATORS, PRECOMPUTED, "student-openvino", *peers):
        if (workloads[0], name) in rows:
            times = {w: f"{rows[w, name]['p50_ms']:.1f}" for w in workloads}
            cells = [f"**{ms}**" if best[w] == name else ms for w, ms in times.items()]
            lines.append([name, rows[workloads[0], name]["precision"], *cells])
    heads = ["contender", "precision", *(f"{w}, ms" for w in workloads)]
    return f"{table(heads, lines, texts=2)}\n\nBold: the fastest fp32 peer of 12 layers. {conditions(record)}"


def render_ahead(record: dict[str, Any]) -> str:
    """Return how much faster both forms of the student are than each contender, with margins."""
    rows, workloads = by_name(record)
    names = [name for name in rows[workloads[0], "student"]["vs"] if not name.startswith("packed-dense-12")]
    lines = []
    for name in names:
        cells = [" / ".join(quoted(rows[w, who]["vs"][name]) for who in ("student", OPERATORS)) for w in workloads]
        lines.append([name, rows[workloads[0], name]["precision"], *cells])
    told = f"In each cell: `student` / `{OPERATORS}`. {conditions(record)}"
    return f"{table(['faster than', 'precision', *workloads], lines, texts=2)}\n\n{told}"


def render_profile(record: dict[str, Any]) -> str:
    """Return where the student's time goes, and what bounds it."""
    rows, _ = by_name(record)
    lines = []
    for profile in record["profiles"]:
        others = [f"{op} {share:.1%}" for op, share in profile["shares"].items() if op not in PRODUCTS]
        flops = sum(p["gflops"] * p["ms"] for p in profile["products"]) / sum(p["ms"] for p in profile["products"])
        shares = [f"{profile[name]:.1%}" for name in ("accounted", "product_share")]
        rates = [f"{flops:.0f}", f"{profile['weights_ms']:.1f}", *fractions(rows, profile)]
        lines.append([profile["workload"], f"{profile['run_ms']:.1f}", *shares, ", ".join(others[:4]), *rates])
    heads = ["workload", "first batch, ms", "accounted for", "matrix products", "largest others", "their GFLOP/s"]
    heads += ["reading all weights once, ms", "realized fraction it leaves", "measured"]
    peaks = record["peaks"]
    runtime = peaks.get("runtime", "PyTorch")  # whose product was timed where records do not say it
    told = (
        f"The fastest matrix product ran at {peaks['gflops']:.0f} GFLOP/s ({runtime}). The machine reads "
        f"{peaks['gigabytes_per_s']:.0f} GB/s. A workload of several batches is profiled on its first one alone; the last column is of all."
    )
    return f"{table(heads, lines)}\n\n{told}"


def fractions(rows: Rows, profile: dict[str, Any]) -> tuple[str, str]:
    """Return the realized fraction against packed dense: if both first read all weights and then computed; and as measured."""
    student, weights_ms = rows[profile["workload"], "student"], profile["weights_ms"]
    name = next(name for name in student["vs"] if name.startswith("packed"))
    dense_ms, ratio = rows[profile["workload"], name]["p50_ms"], student["vs"][name]["flops_ratio"]
    bound = if_weights_are_read_first(dense_ms, ratio, weights_ms, weights_ms)
    return f"{bound:.2f}", f"{student['vs'][name]['realized_fraction']:.2f}"


def render_sweeps(record: dict[str, Any]) -> str:
    """Return speedup over packed dense by retention."""
    sweeps = record["sweeps"]
    lines = []
    for sweep in sweeps:
        cells = [f"{point['vs'][sweep['baseline']]['speedup']:.2f}x" for point in sweep["points"]]
        even = "none" if sweep["break_even"] is None else f"{sweep['break_even']:.0%}"
        lines.append([sweep["workload"], *cells, even])
    heads = ["workload", *(f"{share:.0%}" for share in sweeps[0]["retention"]), "break-even"]
    return f"![speedup against retention](speedup-retention.svg)\n\n{table(heads, lines)}"


def render_arrivals(rows: list[dict[str, Any]], stream: str) -> str:
    """Return latency under load, a line per load."""
    rows = [row for row in rows if row["stream"] == stream]
    if not rows:
        raise KeyError(stream)
    capacity, first = rows[0]["capacity_per_s"], rows[0]
    lines = []
    for load, rate in {row["load"]: row["requests_per_s"] for row in rows}.items():
        here = {row["contender"]: f"{row['p50_ms']:.0f} / {row['p99_ms']:.0f}" for row in rows if row["load"] == load}
        lines.append([f"{rate:.1f}", *(here.get(name, "overloaded") for name in capacity)])
    lines.append(["most it serves, requests/s", *(f"{value:.3g}" for value in capacity.values())])
    told = (
        f"p50 / p99 in ms from arrival to answer; {first['requests']} texts of {first['tokens']:.0f} tokens in the mean, batches of at "
        f"most {first['budget_tokens']:,} tokens, retention {first['retention']}, {place(first)}. "
        f"`python -m benchmarks.cpu.arrivals --stream {stream}`."
    )
    picture = f"![p99 under load](arrivals-{stream}.svg)"
    return "\n\n".join([picture, table(["requests/s", *capacity], lines, texts=0), told])


def render_stream(record: dict[str, Any]) -> str:
    """Return a record of `mixed_stream.py`: seconds of each way to run the stream, model by model."""
    return "\n\n".join(_stream_of(name, part) for name, part in record.items())


def _stream_of(model: str, record: dict[str, Any]) -> str:
    rows = {(row["contender"], row["split"]): row for row in record["results"]}
    names = {"graph": "graph alone", "operators": "with the operators"}
    names |= {"bf16": "bf16 with the operators", "int8": "INT8 per token with the operators"}
    whole = record["batch"]

    def cell(name: str, split: int) -> str:
        row = rows[name, split]
        return f"{row['s']:.3f} ({row['ratio']:.2f}x ± {row['margin']:.2f})"

    lines = []
    for split in dict.fromkeys(split for name, split in rows if name in names):
        what = {whole: "batches as they arrive", 1: "one text at a time"}.get(
            split, f"split by length into parts of {split}"
        )
        lines.append([f"ONNX Runtime, {what}", *(cell(name, split) for name in names)])
    loads = ("load-graph", "load", "load-bf16", "load-int8")
    lines.append(["`load`, all texts at once", *(f"{rows[name, whole]['s']:.3f}" for name in loads)])
    tables = rows["load-precomputed", whole]
    told = (
        f"Seconds for {record['texts']} texts, medians of {record['rounds']} rounds in turns; in brackets, times the best of the column. "
        f"`load` tokenizes, too. With the tables of `--precompute-embedding-projections` it takes {tables['s']:.3f}. "
        f"`{model}`, `python -m benchmarks.cpu.mixed_stream OUT PRECOMPUTED`; "
        f"{place(record)}, ONNX Runtime {record['versions']['onnxruntime']}."
    )
    return f"{table(['', *names.values()], lines)}\n\n{told}"


def render_embedding(record: dict[str, Any]) -> str:
    """Return a record of `embedding.py`: texts per second of all contenders, by stream and by who sorts."""
    rows = {(row["stream"], row["how"], row["contender"]): row for row in record["results"]}
    streams = list(dict.fromkeys((stream, how) for stream, how, _ in rows))
    lines = []
    for name in dict.fromkeys(contender for *_, contender in rows):
        cells = [name]
        for key in streams:
            row = rows[*key, name]
            slower = "" if name == OURS else f" ({row['times_ours']:.2f}x ± {row['margin']:.2f})"
            cells.append(f"{per_second(row['texts_per_s'])}{slower}")
        lines.append(cells)
    versions = record["versions"]
    names = ("onnxruntime", "sentence-transformers", "fastembed", "optimum-onnx", "optimum-intel")
    told = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    more = f"Texts per second; in brackets, how many times as long it takes. {place(record)}, {told}."
    return f"{table(['contender', *(f'{stream}, {how}' for stream, how in streams)], lines)}\n\n{more}"


GOAL = 0.95
"""Of the speedup that the model alone has, what should be left from text to answer."""


def render_end_to_end(record: dict[str, Any]) -> str:
    """Return, of each stream and contender, its rates, its single requests, and how many times as long it takes as `load`."""
    lines = []
    for row in record["results"]:
        ours = row["contender"] == OURS
        ratios = [
            "" if ours else f"{row[n]:.2f} ± {row[f'{n}_margin']:.2f}" for n in ("times_ours", "model_times_ours")
        ]
        low, high = _left(row)
        rates = [per_second(row[name]) for name in ("texts_per_s", "texts_per_cpu_s")]
        single = f"{row['p50_ms']:.1f} / {row['p99_ms']:.1f}"
        left = "" if ours else f"{row['left']:.2f} ({low:.2f} to {high:.2f})"
        lines.append([row["stream"], row["contender"], str(row["batch"]), *rates, single, *ratios, left])
    heads = ["stream", "contender", "batch", "texts/s", "texts per CPU second", "single texts, p50 / p99 in ms"]
    heads += ["times as long, text to answer", "times as long, model alone", "left"]
    versions, student = record["versions"], record["student"]
    names = ("onnxruntime", "openvino", "ctranslate2", "transformers", "torch")
    told = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    counts = " and ".join(f"{count} texts of {stream}" for stream, count in record["texts"].items())
    requests = dict.fromkeys(f"{row['requests']} of {row['stream']}" for row in record["results"])
    more = [
        f"`load` takes `{student['target']}`. Medians of {record['rounds']} rounds over {counts}; single texts: {' and '.join(requests)}. "
        f"{reached(record)} "
        f"{place(record)}, {told}; optimum-onnx {record['optimum'].get('optimum-onnx', 'not installed')} with "
        f"transformers {record['optimum'].get('transformers', 'not installed')}."
    ]
    more += [f"Not measured: {name} ({why})." for name, why in record["left_out"].items()]
    return f"{table(heads, lines, texts=2)}\n\n" + "\n".join(more)


def _left(row: dict[str, Any]) -> tuple[float, float]:
    """Return the 95% interval of what is left; older records have a margin."""
    if "left_low" in row:
        return row["left_low"], row["left_high"]
    return row["left"] - row["left_margin"], row["left"] + row["left_margin"]


def reached(record: dict[str, Any]) -> str:
    """Say which lines are shown to reach the goal: those whose whole interval does."""
    rows = [row for row in record["results"] if row["contender"] != OURS]
    shown = sum(_left(row)[0] >= GOAL for row in rows)
    below = sum(_left(row)[1] < GOAL for row in rows)
    return (
        f"{shown} of {len(rows)} lines are shown to keep at least {GOAL:.2f} of the speedup, and {below} to keep less. For the "
        f"other {len(rows) - shown - below} the interval contains {GOAL:.2f}, so this run does not decide."
    )


def render_sparse(record: dict[str, Any]) -> str:
    """Return a record of `sparse_weights.py`: a student beside dense BERT of its depth in DeepSparse, with and without zeros."""
    rows, workloads = by_name(record)
    names = list(dict.fromkeys(name for _, name in rows))
    lines = []
    for name in names:
        cells = [name]
        for w in workloads:
            row = rows[w, name]
            ahead = "" if name == "student" else f" ({row['times_student']:.2f}x ± {row['margin']:.2f})"
            cells.append(f"{row['ms']:.1f}{ahead}")
        lines.append(cells)
    versions = record["versions"]
    told = (
        f"ms; in brackets, how many times as long as the student. `{record['command']}`: {place(record)}, ONNX Runtime "
    )
    more = f"{told}{versions['onnxruntime']}, DeepSparse {versions.get('deepsparse', 'not installed')}."
    return f"{table(['contender', *workloads], lines)}\n\n{more}"
