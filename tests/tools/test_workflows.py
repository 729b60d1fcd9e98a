"""The workflows of GitHub and the hooks of pre-commit parse, and call only what exists."""

import re
import shlex
import subprocess

import pytest
import yaml

from tests.small import ROOT
from tools import versions

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def parsed(path):
    return yaml.safe_load(path.read_text(encoding="utf8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_what_exists_and_asks_for_little(path):
    workflow = parsed(path)
    assert workflow.get("on", workflow.get(True))  # YAML 1.1 reads the key `on` as the truth value
    assert workflow["permissions"] == {"contents": "read"}
    called = 0
    for job in workflow["jobs"].values():
        runs = [step["run"] for step in job["steps"] if "run" in step]
        if "permissions" in job:  # the job that publishes, which runs none of our code
            assert set(job["permissions"]) == {"pages", "id-token"} and not runs
        for line in "\n".join(runs).splitlines():
            words = shlex.split(line.replace("${{ matrix.set }}", "lowest"))
            dry = ["make", "-n", *words[1:], "PY=python3"]
            assert words[0] == "make", words
            assert subprocess.run(dry, cwd=ROOT, capture_output=True).returncode == 0, words
            called += 1
    assert called


def test_every_set_of_releases_is_tried_every_week():
    (job,) = parsed(ROOT / ".github" / "workflows" / "versions.yml")["jobs"].values()
    assert tuple(row["set"] for row in job["strategy"]["matrix"]["include"]) == versions.SETS


def test_hooks_are_local_and_call_what_lint_calls():
    (repository,) = parsed(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    lint = subprocess.run(["make", "-n", "lint"], cwd=ROOT, capture_output=True, text=True).stdout
    for hook in repository["hooks"]:
        tool = " ".join(word for word in hook["entry"].split() if not word.startswith("-"))
        assert f"-m {tool.removeprefix('.venv/bin/')}" in re.sub(" --[a-z-]+", "", lint)
