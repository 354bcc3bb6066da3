from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REGISTRY = """
from enum import Enum
class HookType(Enum):
    AROUND = "around"
class HookRegistry:
    placed = []
    @classmethod
    def register(cls, target, hook, hook_type):
        cls.placed.append(target)
"""
MANAGER = """
class TokenizerManager:
    def __init__(self): ...
    async def _send_one_request(self, tokenized): ...
    async def _send_batch_request(self, tokenized): ...
    async def _handle_batch_output(self, outputs): ...
    async def pause_generation(self, obj): ...
    async def continue_generation(self, obj): ...
class SignalHandler:
    def running_phase_sigquit_handler(self, signum=None, frame=None): ...
"""
SAY = """
import sys
from inferscope.adapters.sglang.plugin import register
register(); register()
registry = sys.modules.get("sglang.srt.plugins.hook_registry")
print(sorted(name for name in sys.modules if name.startswith("inferscope")))
print(sorted(registry.HookRegistry.placed) if registry else None)
"""

IN_A_CHILD = """
import multiprocessing, os, sys
def serve(launcher):
    __import__(launcher)
    from inferscope.adapters.sglang.plugin import register
    register()
    registry = sys.modules.get("sglang.srt.plugins.hook_registry")
    print(len(registry.HookRegistry.placed) if registry else 0)
    print("INFERSCOPE_ENGINE_ID" in os.environ)
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=serve, args=sys.argv[1:])
    process.start()
    process.join()
"""


def engine(folder: Path, *, manager: str = MANAGER) -> Path:
    """Write an SGLang of which only the registry and the front end exist."""
    plugins, managers, entrypoints = (
        folder / "sglang" / "srt" / name for name in ("plugins", "managers", "entrypoints")
    )
    for package in (folder / "sglang", folder / "sglang" / "srt", plugins, managers, entrypoints):
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
    (plugins / "hook_registry.py").write_text(REGISTRY)
    (managers / "tokenizer_manager.py").write_text(manager)
    (managers / "detokenizer_manager.py").touch()
    (entrypoints / "engine.py").touch()
    return folder


def observe_engine(
    tmp_path: Path, *command: str, program: str = SAY, **environment: str
) -> tuple[list[str], str]:
    """Return the output and the messages of a process that registers twice."""
    source = tmp_path / "program.py"
    source.write_text(program)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("INFERSCOPE")}
    done = subprocess.run(
        [sys.executable, str(source), *command],
        env={**inherited, "PYTHONPATH": path, "INFERSCOPE_DIR": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines(), done.stderr


def test_nothing_is_imported_or_placed_unless_asked_for(tmp_path: Path) -> None:
    for environment in ({}, {"INFERSCOPE": "0"}):
        (loaded, placed), output = observe_engine(engine(tmp_path), **environment)
        assert placed == "None"
        assert not output
        assert loaded == str(
            [
                "inferscope",
                "inferscope.adapters",
                "inferscope.adapters.registry",
                "inferscope.adapters.sglang",
                "inferscope.adapters.sglang.plugin",
                "inferscope.errors",
                "inferscope.observing",
            ]
        )


def test_each_hook_is_placed_once_however_often_it_is_asked_for(tmp_path: Path) -> None:
    (loaded, placed), output = observe_engine(engine(tmp_path), INFERSCOPE="1")
    prefix = "sglang.srt.managers.tokenizer_manager"
    names = ("__init__", "_handle_batch_output", "_send_batch_request", "_send_one_request")
    names += ("continue_generation", "pause_generation")
    targets = [f"{prefix}.SignalHandler.running_phase_sigquit_handler"]
    targets += [f"{prefix}.TokenizerManager.{name}" for name in names]
    assert placed == str(targets)
    assert not output
    assert "inferscope.adapters.sglang.hooks" in loaded


def test_a_server_in_a_child_process_is_observed_as_one_engine(tmp_path: Path) -> None:
    engine(tmp_path)
    launcher = "sglang.srt.entrypoints.engine"
    (placed, names_its_children), output = observe_engine(
        tmp_path, launcher, program=IN_A_CHILD, INFERSCOPE="1"
    )
    assert (placed, names_its_children, output) == ("7", "True", "")


def test_nothing_is_placed_in_the_detokenizer(tmp_path: Path) -> None:
    engine(tmp_path)
    detokenizer = "sglang.srt.managers.detokenizer_manager"
    (placed, _), output = observe_engine(tmp_path, detokenizer, program=IN_A_CHILD, INFERSCOPE="1")
    assert (placed, output) == ("0", "")


def test_of_a_unit_with_a_missing_place_only_what_opens_the_ring_is_placed(tmp_path: Path) -> None:
    changed = MANAGER.replace("_handle_batch_output", "_handle_outputs")
    (_, placed), output = observe_engine(engine(tmp_path, manager=changed), INFERSCOPE="1")
    assert placed == "['sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__']"
    (line,) = output.splitlines()
    assert "unsupported" in line
    assert "_handle_batch_output is missing" in line


def test_an_engine_that_cannot_be_paused_is_observed_without(tmp_path: Path) -> None:
    (_, placed), output = observe_engine(
        engine(tmp_path, manager=MANAGER.replace("def pause_", "def halt_")), INFERSCOPE="1"
    )
    assert "_handle_batch_output" in placed
    assert "continue" not in placed
    (line,) = output.splitlines()
    assert "unsupported: pauses: " in line


def test_an_engine_without_a_registry_is_unsupported(tmp_path: Path) -> None:
    engine(tmp_path)
    (tmp_path / "sglang" / "srt" / "plugins" / "hook_registry.py").unlink()
    _, output = observe_engine(tmp_path, INFERSCOPE="1")
    assert "no registry of hooks" in output
