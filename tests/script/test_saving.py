"""A planned program loads what it has saved, wherever it put the file; no weights are written."""

import pytest

from tests.script import HEAD, STEP, run

# Each writes and reads `state`; the loaded is what would be loaded without a plan.
WAYS = {
    "a file": "torch.save(state, 'a.pt'); again = torch.load('a.pt')\n",
    "a file that moved": "torch.save(state, 'new.pt'); os.replace('new.pt', 'a.pt')\n"
    "again = torch.load(Path('a.pt'), map_location=device)\n",
    "a copy": "os.makedirs('out'); torch.save(state, 'out/a.pt')\n"
    "shutil.copy('out/a.pt', 'b.pt'); again = torch.load('b.pt', weights_only=False)\n",
    "an open file": "with open('a.pt', 'wb') as file: torch.save(state, file)\n"
    "with open('a.pt', 'rb') as file: again = torch.load(file)\n",
    "memory": "file = io.BytesIO(); torch.save(state, file); file.seek(0)\n"
    "again = torch.load(file)\n",
}
CHECK = """\
assert list(again) == ['model', 'optimizer', 'epoch', 'kept', 'name']
assert again['epoch'] == 3 and again['name'] == 'x' and again['kept'].tolist() == [1.5, 2.5]
assert again['model']['weight'].shape == (256, 256) and again['model']['weight'].is_cuda
assert again['model']['weight'] is not model.weight
model.load_state_dict(again['model']); optimizer.load_state_dict(again['optimizer'])
assert torch.load({file}, map_location='cpu')['model']['weight'].device.type == 'cpu'
"""
STATE = """\
state = {'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'epoch': 3,
         'kept': torch.tensor([1.5, 2.5]), 'name': 'x'}
"""
IMPORTS = "import io, os, shutil\nfrom pathlib import Path\n"


@pytest.mark.parametrize("name", WAYS)
def test_what_is_saved_is_loaded_again(name, program, tmp_path):
    file = "(file.seek(0), file)[1]" if name == "memory" else "'a.pt'"
    file = "'b.pt'" if name == "a copy" else file
    check = CHECK.format(file=file)
    text = f"{IMPORTS}{HEAD}for _ in range(1):\n{STEP}{STATE}{WAYS[name]}{check}while True:\n{STEP}"
    assert run(program(text))["fits"]
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_what_is_saved_takes_no_memory_of_the_gpu_until_it_is_loaded(program):
    """Each save after a step of another model: alive are the parameters of one, not of all."""
    loop = f"{IMPORTS}{HEAD}while True:\n{STEP}"
    plain = run(program(loop))
    saves = "    torch.save({'w': torch.rand(512, 512, device=device)}, 'w.pt')\n"
    saving = run(program(loop + saves))
    size = 512 * 512 * 4
    assert saving["peak"] - plain["peak"] <= size
    held = run(program(loop + saves + "    kept = torch.load('w.pt')\n"))
    assert held["peak"] - plain["peak"] >= size


def test_a_file_of_before_is_read_as_ever(program, tmp_path):
    import torch
    from safetensors.torch import save_file

    torch.save({"epoch": torch.tensor(7)}, tmp_path / "old.pt")
    save_file({"epoch": torch.tensor(8)}, tmp_path / "old.safetensors")
    text = (
        "from safetensors.torch import load_file, save_file\n"
        "assert torch.load('old.pt')['epoch'].item() == 7\n"
        "assert load_file('old.safetensors')['epoch'].item() == 8\n"
        "save_file({'w': model.weight}, 'new.safetensors')\n"
        "assert load_file('new.safetensors')['w'].shape == (256, 256)\n"
    )
    assert run(program(f"{HEAD}{text}while True:\n{STEP}"))["fits"]


def test_a_model_that_was_saved_in_a_folder_is_made_again(program, tiny, tmp_path):
    text = f"""\
import torch
from transformers import AutoModel
model = AutoModel.from_pretrained({str(tiny / "bert")!r})
model.save_pretrained('out/best')
model = AutoModel.from_pretrained('out/best').cuda()
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.ones(2, 8, dtype=torch.long).cuda())[0].mean().backward()
    optimizer.step()
"""
    assert run(program(text))["fits"]
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
