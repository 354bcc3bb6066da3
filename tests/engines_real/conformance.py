"""What tests have shown of real engines: features by version, a table in Markdown for each engine.

    markers ─► claims ┐
                      ├─► findings ─► merged into the tables of earlier runs
    reports ─► outcomes ┘

A cell says what all tests that claim it have shown, or `fails` if one of them failed. If one of
them was skipped or not run, the cell stays as it was: a run of a few tests takes nothing back.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Level = Literal["full", "partial", "unsupported"]
Outcome = Literal["passed", "skipped", "failed"]
Finding = tuple[str, str, str]
"""Engine, environment and feature."""
Cell = tuple[str, str, str]
"""Engine, version and feature."""

LEVELS: tuple[Level, ...] = ("full", "partial", "unsupported")
ENGINES = {
    "vLLM": ("vllm", "vllm"),
    "SGLang": ("sgl", "sglang"),
    "transformers": ("tf", "transformers"),
    "llama-cpp-python": ("lcpp", "llama-cpp-python"),
}
"""Engine → its usual environment under `venvs/`, and the distribution whose version it is."""

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
    "tokens and phases of every step = a spy's in the engine",
    "every step joined and conserved, every ledger closed",
    "chunked and mixed prefill",
    "prefix cache",
    "why a prompt missed the prefix cache",
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
    "`inferscope doctor` names what is unsupported",
)
"""The rows, in their order."""

_NEVER = "-"
_FAILS = "fails"
_PREAMBLE = """# What is known to work

Look up which features work with your engine and version. `make test-engines` writes this page.
`full`: all tests on the real engine passed. `partial` and `unsupported` name what is missing.
`fails`: a test failed. `-`: no test.

For another version, `inferscope doctor` [compares names](run.md#which-version-of-the-engine) and
`make test-engines VERSIONS="vllm@0.30.0 …"` compares each step with an independent count.
More on each: [vLLM](vllm.md), [SGLang](sglang.md),
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
    folder: str = ""
    """The environment, where it is not the engine's usual one."""

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
    def finding(self) -> Finding:
        """Return what it is claimed of."""
        return self.engine, self.folder or ENGINES[self.engine][0], self.feature

    @property
    def text(self) -> str:
        """Text of the cell."""
        return f"{self.level}: {self.note}" if self.note else self.level


Show = Callable[[Claim], None]
"""What a test calls that learns as it runs what it shows."""


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

    def findings(self) -> dict[Finding, str]:
        """Return the texts of the cells that this session can judge."""
        tests: dict[Finding, list[tuple[Claim, Outcome | None]]] = defaultdict(list)
        for test, claims in self.claims_by_test.items():
            for claim in claims:
                tests[claim.finding].append((claim, self._of(test)))
        return {
            finding: _FAILS if "failed" in outcomes else _worst(claim for claim, _ in shown)
            for finding, shown in tests.items()
            if (outcomes := {outcome for _, outcome in shown}) == {"passed"} or "failed" in outcomes
        }

    def _of(self, test: str) -> Outcome | None:
        return self.outcome_by_test.get(test)


@dataclass
class Table:
    """Texts of the cells."""

    cells: dict[Cell, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Table:
        """Read what `render` wrote."""
        cells: dict[Cell, str] = {}
        engine, versions = "", []
        for line in text.splitlines():
            words = [word.strip() for word in line.strip().strip("|").split("|")]
            if line.startswith("## "):
                engine = line.removeprefix("## ")
            elif line.startswith("| feature |"):
                versions = words[1:]
            elif line.startswith("| ") and words[0] in FEATURES:
                for version, content in zip(versions, words[1:], strict=True):
                    if content != _NEVER:
                        cells[engine, version, words[0]] = content
        return cls(cells)

    def render(self) -> str:
        """Return the page."""
        parts = [_PREAMBLE]
        for engine in ENGINES:
            versions = {version for named, version, _ in self.cells if named == engine}
            columns = sorted(versions, key=_numbers, reverse=True)
            if not columns:
                continue
            rows = [["feature", *columns], ["---"] * (1 + len(columns))]
            for feature in FEATURES:
                row = [self.cells.get((engine, column, feature), _NEVER) for column in columns]
                if set(row) != {_NEVER}:
                    rows.append([feature, *row])
            table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
            parts.append(f"## {engine}\n\n{table}\n")
        return "\n".join(parts)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def version_in(peers: Path, engine: str, folder: str) -> str | None:
    """Ask an environment for its version of an engine; None where it has none."""
    python = peers / "venvs" / folder / "bin" / "python"
    if not python.exists():
        return None
    program = f"import importlib.metadata as m; print(m.version({ENGINES[engine][1]!r}))"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def update(page: Path, peers: Path, findings: Mapping[Finding, str]) -> None:
    """Merge findings into a page; without any it is left alone."""
    environments = {(engine, folder) for engine, folder, _ in findings}
    versions = {each: version_in(peers, *each) for each in environments}
    known: dict[Cell, str] = {}
    for (engine, folder, feature), text in findings.items():
        version = versions[engine, folder]
        if version is not None:
            known[engine, version, feature] = text
    if not known:
        return
    table = Table.parse(page.read_text(encoding="utf-8")) if page.exists() else Table()
    table.cells.update(known)
    page.write_text(table.render(), encoding="utf-8")


def _worst(claims: Iterable[Claim]) -> str:
    """Return the text of the claim that claims least."""
    return max(claims, key=lambda claim: LEVELS.index(claim.level)).text
