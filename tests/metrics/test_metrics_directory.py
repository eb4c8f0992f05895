"""Facts about fresh processes: each case is a program of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scrapes import run_python

from kvplugin.metrics.directory import DIRECTORY_VARIABLE, PROMETHEUS_VARIABLE

CHOOSE = """
import json, os, sys
from kvplugin.metrics.directory import metrics_directory, prepare_directory
prepare_directory()
chosen = metrics_directory()
"""


def test_the_choice_is_light() -> None:
    """It is made in the first moments of every vLLM process, before prometheus_client may be imported."""
    heavy = "print(sorted({'torch', 'numba', 'prometheus_client', 'vllm'} & set(sys.modules)))"
    assert run_python("-c", CHOOSE + heavy).strip() == "[]"


def test_a_private_directory_is_named_not_made_and_removed_at_exit() -> None:
    use = "made = chosen.exists(); chosen.mkdir(); (chosen / 'counter_x.db').touch()"
    directory, made_by_choice = json.loads(run_python("-c", CHOOSE + use + "; print(json.dumps([str(chosen), made]))"))
    assert not made_by_choice
    assert not Path(directory).exists()
    assert Path(directory).parent.exists()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_children_share_the_directory_and_leave_it(tmp_path: Path, method: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        f"""
import multiprocessing
from kvplugin.metrics.directory import metrics_directory, prepare_directory

# A spawned child imports this module, as it imports vLLM, before multiprocessing has set it up.
prepare_directory()

def child(answers):
    answers.put(str(metrics_directory()))

if __name__ == "__main__":
    chosen = metrics_directory()
    chosen.mkdir()
    context = multiprocessing.get_context({method!r})
    answers = context.SimpleQueue()
    process = context.Process(target=child, args=(answers,))
    process.start()
    process.join()
    print(chosen, answers.get(), chosen.exists())
"""
    )
    parents, childs, still_there = run_python(str(script)).split()
    assert childs == parents
    assert still_there == "True"


def test_a_plain_fork_leaves_the_directory() -> None:
    """It runs the exit handlers it inherits, unlike multiprocessing's."""
    fork = """
chosen.mkdir()
child = os.fork()
if child == 0:
    sys.exit()
os.waitpid(child, 0)
print(chosen.exists())
"""
    assert run_python("-c", CHOOSE + fork).strip() == "True"


def test_a_program_started_by_another_chooses_its_own() -> None:
    """Else two servers started from one test run or notebook would add up their counters."""
    inner = CHOOSE + "print(chosen)"
    outer = CHOOSE + f"import subprocess; subprocess.run([sys.executable, '-c', {inner!r}]); print(chosen)"
    found = run_python("-c", outer).split()
    assert len(set(found)) == 2


def test_an_operators_directory_is_used_and_kept(tmp_path: Path) -> None:
    given = str(tmp_path / "ours")
    used = run_python("-c", CHOOSE + "chosen.mkdir(); print(chosen)", environment={DIRECTORY_VARIABLE: given})
    assert used.strip() == given
    assert Path(given).is_dir()


def test_prometheus_variable_wins_even_when_set_later(tmp_path: Path) -> None:
    """vLLM sets it after the choice, for several API servers."""
    late = f"os.environ[{PROMETHEUS_VARIABLE!r}] = {str(tmp_path)!r}; print(metrics_directory())"
    assert run_python("-c", CHOOSE + late).strip() == str(tmp_path)
