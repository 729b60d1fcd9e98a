"""The workflows of GitHub and the hooks of pre-commit parse, and call only what exists."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from tools import versions

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf8"), re.M))


def parsed(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf8"))


def jobs(path: Path) -> list[dict]:
    return list(parsed(path)["jobs"].values())


def commands(path: Path) -> list[list[str]]:
    """The words of every line that a workflow runs."""
    text = [step["run"] for job in jobs(path) for step in job["steps"] if "run" in step]
    text = [re.sub(r"\$\{\{ matrix\.set \}\}", "lowest", run) for run in text]
    return [shlex.split(line) for run in text for line in run.splitlines()]


def targets(words: list[str]) -> list[str]:
    """The targets of a call of make: what is neither an option nor a variable."""
    return [word for word in words[1:] if "=" not in word and not word.startswith("-")]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_only_targets_that_exist(path):
    assert commands(path)
    for words in commands(path):
        assert words[0] == "make" and targets(words) and set(targets(words)) <= TARGETS, words
        dry = ["make", "-n", *words[1:], "PY=python3"]
        assert subprocess.run(dry, cwd=ROOT, capture_output=True).returncode == 0, words


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_complete_and_asks_for_little(path):
    # YAML 1.1 reads the key `on` as the truth value.
    workflow = parsed(path)
    assert workflow.get("on", workflow.get(True))
    assert workflow["permissions"] == {"contents": "read"}
    for job in jobs(path):
        assert job["runs-on"] and job["timeout-minutes"]
        if "permissions" in job:  # the job that publishes, which runs none of our code
            assert set(job["permissions"]) == {"pages", "id-token"}
            assert not [step for step in job["steps"] if "run" in step]
            continue
        setup = next(step for step in job["steps"] if "setup-python" in step.get("uses", ""))
        assert setup["with"]["cache"] == "pip"


def test_every_set_of_releases_is_tried_every_week():
    (job,) = jobs(ROOT / ".github" / "workflows" / "versions.yml")
    assert tuple(row["set"] for row in job["strategy"]["matrix"]["include"]) == versions.SETS


def test_hooks_are_local_and_call_what_lint_calls():
    (repository,) = parsed(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    lint = subprocess.run(["make", "-n", "lint"], cwd=ROOT, capture_output=True, text=True).stdout
    for hook in repository["hooks"]:
        words = hook["entry"].split()
        assert hook["language"] == "system" and words[0].startswith(".venv/bin/")
        tool = " ".join(word for word in words if not word.startswith("-"))
        assert f"-m {tool.removeprefix('.venv/bin/')}" in lint
