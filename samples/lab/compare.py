"""Run the lab's comparisons, one switch of the engine each, and keep their pages.

python samples/lab/compare.py [NAME…]

Each serves 16 runs of 20 requests. Writes comparisons/NAME.txt and NAME.json beside this file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from measure import machine
from served import served_comparison

from inferscope.json_document import json_line
from inferscope.text import ComparisonDocument, comparison_page

COMPARISONS = {
    "prefix_cache": ("--no-prefix-cache", "--prefix-cache"),
    "token_budget": ("--token-budget 32", "--token-budget 512"),
    "speculative": ("", "--speculative ngram"),
    "overlap": ("--no-overlap", "--overlap"),
    "draft": ("", "--speculative draft"),
    "int8": ("--dtype bfloat16", "--dtype bfloat16 --quantization int8"),
    "int4": ("--dtype bfloat16", "--dtype bfloat16 --quantization int4"),
    "tensor_parallel": ("", "--tensor-parallel 2"),
    "pipeline_parallel": ("", "--pipeline-parallel 2"),
}
"""Two option sets by name: a new switch of the engine is one more line."""
SERVED = {"disaggregation": ("", "--disaggregate")}
"""Option sets of `serve` by name, for switches that start two engines: `demo` starts one."""
FOLDER = Path(__file__).parent / "comparisons"
_WIDTH = 110


def compare(name: str) -> None:
    """Run a comparison and write its document and its page."""
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    if name in SERVED:
        document = served_comparison(*SERVED[name])
        command = f"python samples/lab/compare.py {name}"
    else:
        a, b = COMPARISONS[name]
        document = _demo_comparison(a, b)
        command = f'inferscope demo --compare "{a}" "{b}"'
    here = machine()
    head = (
        f"$ {command}\n"
        f"{here['cpu']}, {here['num_cpus']} CPUs, one thread; load average before: {load}\n\n"
    )
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json_line(document), encoding="utf-8")
    page = comparison_page(document, width=_WIDTH, ascii=False)
    (FOLDER / f"{name}.txt").write_text(head + page, encoding="utf-8")
    print(page)


def _demo_comparison(a: str, b: str) -> ComparisonDocument:
    """Return the comparison of two option sets of the demo's engine."""
    with tempfile.TemporaryDirectory() as folder:
        words = ("demo", "--compare", a, b, "--json", "--out", folder)
        done = subprocess.run(
            [sys.executable, "-m", "inferscope", *words], stdout=subprocess.PIPE, check=True
        )
    return msgspec.json.decode(done.stdout, type=ComparisonDocument)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or (*COMPARISONS, *SERVED):
        compare(chosen)
