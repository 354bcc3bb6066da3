"""What tests have shown of real engines: features by engine and version, a table in Markdown.

    markers ─► claims ┐
                      ├─► findings ─► merged into the table of earlier runs
    reports ─► outcomes ┘

A cell says what all tests that claim it have shown, or `fails` if one of them failed. If one of
them was skipped or not run, the cell stays as it was: a run of a few tests takes nothing back.
"""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Level = Literal["full", "partial", "unsupported"]
Outcome = Literal["passed", "skipped", "failed"]
Cell = tuple[str, str]
"""Engine and feature."""

LEVELS: tuple[Level, ...] = ("full", "partial", "unsupported")
ENGINES = {
    "vLLM": ("vllm", "vllm"),
    "SGLang": ("sgl", "sglang"),
    "transformers": ("tf", "transformers"),
    "llama-cpp-python": ("lcpp", "llama-cpp-python"),
}
"""Column → the environment under `venvs/`, and the distribution whose version it is."""

FEATURES = (
    "`inferscope run` in front of the server",
    "installing it changes no other package",
    "imports nothing unless switched on",
    "HTTP receipt and last byte are the edges",
    "a slow tokeniser shows as `frontend`",
    "the client's id (`X-Request-Id`)",
    "its own traces and ours are the client's (`traceparent`)",
    "client's clock and ours within [0, 5 ms]",
    "engine's own `/metrics` agree",
    "tokens of slices = the API's `usage`",
    "every step joined and conserved, every ledger closed",
    "chunked and mixed prefill",
    "prefix cache",
    "preemption and recompute",
    "speculative decoding (n-gram)",
    "overlapped scheduling, and without",
    "several answers (`n`)",
    "stop strings",
    "LoRA adapters",
    "clients that hang up are cancels",
    "a pause is what requests wait for",
    "what was asked of the sampling (`gen_ai.request.*`)",
    "refused requests, with their status",
    "health probes are no requests",
    "several API servers",
    "KV transfers between workers",
    "tensor ranks",
    "data-parallel replicas",
    "offline, without a server",
    "`attach PID`, started without us (Python 3.14)",
    "`inferscope profile PID`",
    "`kill -9` of the core",
    "`kill -9` of the front end",
    "`kill -9` of a worker",
    "the same answers with and without the probe",
    "a fault of ours changes no answer",
    "an unsupported scheduler: no ledger, and the reason shown",
)
"""The rows, in their order."""

_NEVER = "-"
_FAILS = "fails"
_PREAMBLE = """# What is known to work

Written by `make test-engines`: a cell is what tests on the real engine have shown at the version in
its column. `full`; `partial` and `unsupported` with what is missing; `fails` where a test failed;
`-` where no test says anything. A skipped test changes nothing, another version of an engine clears
its column. More on each: [vLLM](vllm.md), [SGLang](sglang.md),
[transformers and llama-cpp-python](transformers.md).
"""


@dataclass(frozen=True)
class Claim:
    """What a test shows of an engine if it passes; the arguments of the marker `conformance`.

    Raises:
        ValueError: there is no such engine, feature or level, or the note is missing or unfit.
    """

    engine: str
    feature: str
    level: Level = "full"
    note: str = ""

    def __post_init__(self) -> None:
        for value, known in (
            (self.engine, ENGINES),
            (self.feature, FEATURES),
            (self.level, LEVELS),
        ):
            if value not in known:
                raise ValueError(f"{value!r} is none of {', '.join(known)}")
        if (self.level == "full") != (not self.note) or set(self.note) & set("|\n"):
            raise ValueError(f"{self.note!r} is no note of a claim that is {self.level!r}")

    @property
    def text(self) -> str:
        """What the cell says."""
        return f"{self.level}: {self.note}" if self.note else self.level


@dataclass
class Evidence:
    """The tests of a session: what they claim and how they ended."""

    claims_by_test: dict[str, list[Claim]] = field(default_factory=dict)
    outcome_by_test: dict[str, Outcome] = field(default_factory=dict)

    def happened(self, test: str, outcome: Outcome, *, is_call: bool) -> None:
        """Note the outcome of a phase of a test: it has passed if its call has, and no other."""
        if outcome == "failed" or (outcome == "skipped" and self._of(test) != "failed"):
            self.outcome_by_test[test] = outcome
        elif is_call:
            self.outcome_by_test.setdefault(test, outcome)

    def findings(self) -> dict[Cell, str]:
        """Return what the cells are to say that this session can judge."""
        tests: dict[Cell, list[tuple[Claim, Outcome | None]]] = defaultdict(list)
        for test, claims in self.claims_by_test.items():
            for claim in claims:
                tests[claim.engine, claim.feature].append((claim, self._of(test)))
        return {
            cell: _FAILS if "failed" in outcomes else _worst(claim for claim, _ in shown)
            for cell, shown in tests.items()
            if (outcomes := {outcome for _, outcome in shown}) == {"passed"} or "failed" in outcomes
        }

    def _of(self, test: str) -> Outcome | None:
        return self.outcome_by_test.get(test)


@dataclass
class Table:
    """Versions by engine, and what the cells say."""

    versions: dict[str, str] = field(default_factory=dict)
    cells: dict[Cell, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Table:
        """Read what `render` wrote."""
        rows = [
            [cell.strip() for cell in line.strip().strip("|").split("|")]
            for line in text.splitlines()
            if line.startswith("|")
        ]
        if not rows:
            return cls()
        columns = [heading.split(" ") for heading in rows[0][1:]]
        versions = {engine: version for engine, version in columns if version != _NEVER}
        cells = {
            (engine, row[0]): content
            for row in rows[2:]
            for (engine, _), content in zip(columns, row[1:], strict=True)
            if content != _NEVER
        }
        return cls(versions, cells)

    def merge(self, versions: Mapping[str, str], findings: Mapping[Cell, str]) -> None:
        """Take over what a session found at these versions."""
        renewed = {
            engine for engine, version in versions.items() if self.versions.get(engine) != version
        }
        self.cells = {cell: text for cell, text in self.cells.items() if cell[0] not in renewed}
        self.versions.update(versions)
        self.cells.update(findings)

    def render(self) -> str:
        """Return the page."""
        headings = [f"{engine} {self.versions.get(engine, _NEVER)}" for engine in ENGINES]
        rows = [["feature", *headings], ["---"] * (1 + len(ENGINES))]
        for feature in FEATURES:
            row = [self.cells.get((engine, feature), _NEVER) for engine in ENGINES]
            if set(row) != {_NEVER}:
                rows.append([feature, *row])
        lines = [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join([_PREAMBLE, *lines]) + "\n"


def versions_in(peers: Path, engines: Iterable[str]) -> dict[str, str]:
    """Ask the environments of these engines for their versions; leave out those that have none."""
    versions = {}
    for engine in engines:
        folder, distribution = ENGINES[engine]
        python = peers / "venvs" / folder / "bin" / "python"
        if python.exists():
            program = f"import importlib.metadata as m; print(m.version({distribution!r}))"
            done = subprocess.run([python, "-c", program], capture_output=True, text=True)
            if done.returncode == 0:
                versions[engine] = done.stdout.strip()
    return versions


def update(page: Path, peers: Path, findings: Mapping[Cell, str]) -> None:
    """Merge findings into a page; without any it is left alone."""
    versions = versions_in(peers, {engine for engine, _ in findings})
    known = {cell: text for cell, text in findings.items() if cell[0] in versions}
    if not known:
        return
    table = Table.parse(page.read_text(encoding="utf-8")) if page.exists() else Table()
    table.merge(versions, known)
    page.write_text(table.render(), encoding="utf-8")


def _worst(claims: Iterable[Claim]) -> str:
    """Return the text of the claim that claims least."""
    return max(claims, key=lambda claim: LEVELS.index(claim.level)).text
