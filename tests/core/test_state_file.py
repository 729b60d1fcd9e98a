"""Files of states: what the digest sees, what is kept, what a folder's lock does."""

import pytest
import torch

from helpers import state_file
from helpers.state_file import FILE, State

TENSORS = {
    "weights": torch.arange(6.0).reshape(2, 3), "half": torch.ones(3, dtype=torch.bfloat16),
    "codes": torch.arange(5, dtype=torch.uint8), "flags": torch.tensor([True, False]),
    "step": torch.tensor(3.0), "nothing": torch.empty(0, 4),
}  # fmt: skip


def state(step):
    return State({"step": step, "text": "ä"}, TENSORS)


def test_a_state_comes_back_as_it_was(tmp_path):
    state_file.write(tmp_path, state(1))
    note, tensors = state_file.read(tmp_path)
    assert note == {"step": 1, "text": "ä"} and tensors.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert torch.equal(tensors[name], value) and tensors[name].dtype == value.dtype


def test_the_newest_state_is_kept(tmp_path):
    assert state_file.read(tmp_path) is None and state_file.peek(tmp_path) == {}
    for step in (1, 2, 3):
        state_file.write(tmp_path, state(step))
    assert {path.name for path in tmp_path.iterdir()} == {FILE}
    assert state_file.read(tmp_path).note["step"] == state_file.peek(tmp_path)["step"] == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held | {"weights": held["weights"].reshape(3, 2)},
        lambda held: held | {"weights": held["weights"].double()},
        lambda held: held | {"weights": held["weights"] + 1e-6},
        lambda held: held | {"codes": held["codes"].view(torch.int8)},
        lambda held: held | {"nothing": torch.empty(4, 0)},
        lambda held: {name: value for name, value in held.items() if name != "nothing"},
        lambda held: held | {"more": torch.empty(0)},
    ],
)
def test_the_digest_changes_with_every_part_of_the_content(change):
    changed = change(TENSORS)
    assert state_file.digest("note", changed) != state_file.digest("note", TENSORS)


def test_the_digest_is_that_of_the_content_alone():
    turned = dict(reversed(TENSORS.items()))
    turned["weights"] = TENSORS["weights"].T.contiguous().T  # the same values, laid out otherwise
    assert state_file.digest("note", turned) == state_file.digest("note", TENSORS)
    assert state_file.digest("other", TENSORS) != state_file.digest("note", TENSORS)


def test_a_held_folder_is_made_and_left_clean(tmp_path):
    with state_file.held(tmp_path / "new" / "runs"):
        pass
    assert [path.name for path in (tmp_path / "new" / "runs").iterdir()] in ([], [state_file.LOCK])


def test_a_file_system_without_locks_is_said_and_used(tmp_path, monkeypatch):
    def none(*_, **__):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(state_file.filelock, "FileLock", none)
    with pytest.warns(UserWarning, match="nothing keeps a second run out"):
        with state_file.held(tmp_path):
            state_file.write(tmp_path, state(1))
