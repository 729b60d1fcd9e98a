"""A planned program loads what it has saved, wherever it put the file; no weights are written."""

import torch
from safetensors.torch import save_file

from tests.script import HEAD, STEP, run

SAVES = """\
state = {'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'epoch': 3,
         'kept': torch.tensor([1.5, 2.5]), 'name': 'x'}
def check(again, device='cuda'):
    assert list(again) == ['model', 'optimizer', 'epoch', 'kept', 'name']
    assert again['epoch'] == 3 and again['name'] == 'x' and again['kept'].tolist() == [1.5, 2.5]
    assert again['model']['weight'].shape == (256, 256)
    assert again['model']['weight'].device.type == device
    assert again['model']['weight'] is not model.weight
    model.load_state_dict(again['model']); optimizer.load_state_dict(again['optimizer'])
torch.save(state, 'new.pt'); os.replace('new.pt', 'moved.pt')
check(torch.load(Path('moved.pt'), map_location=device))
check(torch.load('moved.pt', map_location='cpu'), 'cpu')
os.makedirs('out'); torch.save(state, 'out/a.pt'); shutil.copy('out/a.pt', 'copy.pt')
check(torch.load('copy.pt', weights_only=False))
with open('open.pt', 'wb') as file: torch.save(state, file)
with open('open.pt', 'rb') as file: check(torch.load(file))
file = io.BytesIO(); torch.save(state, file); file.seek(0)
check(torch.load(file))
assert torch.load('old.pt')['epoch'].item() == 7
assert load_file('old.safetensors')['epoch'].item() == 8
save_file({'w': model.weight}, 'new.safetensors')
assert load_file('new.safetensors')['w'].shape == (256, 256)
"""
IMPORTS = """\
import io, os, shutil
from pathlib import Path
from safetensors.torch import load_file, save_file
"""


def test_what_is_saved_is_loaded_again_and_files_of_before_as_ever(program, tmp_path):
    torch.save({"epoch": torch.tensor(7)}, tmp_path / "old.pt")
    save_file({"epoch": torch.tensor(8)}, tmp_path / "old.safetensors")
    before = {path.name for path in tmp_path.iterdir()}
    text = f"{IMPORTS}{HEAD}for _ in range(1):\n{STEP}{SAVES}while True:\n{STEP}"
    assert run(program(text))["fits"]
    assert {path.name for path in tmp_path.iterdir()} == {*before, "train.py"}


def test_what_is_saved_takes_no_memory_of_the_gpu_until_it_is_loaded(program):
    """Each save after a step of another model: alive are the parameters of one, not of all."""
    loop = f"{HEAD}while True:\n{STEP}"
    saves = "    torch.save({'w': torch.rand(512, 512, device=device)}, 'w.pt')\n"
    loads = "    kept = torch.load('w.pt')\n"
    plain, saving, held = (
        run(program(text))["peak"] for text in (loop, loop + saves, loop + saves + loads)
    )
    assert saving - plain <= 512 * 512 * 4 <= held - plain


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
