"""Fine-tune extractive question answering: windows with a stride, spans of the answer as labels."""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

folder = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(folder)
context = "The harvest was smaller than last year because of the long drought in the south. " * 3
questions = ["Why was the harvest smaller?", "Where was the drought?"] * 12
answer = context.index("drought"), context.index("drought") + len("drought")
windows = tokenizer(
    questions,
    [context] * len(questions),
    truncation="only_second",
    max_length=40,
    stride=12,
    return_overflowing_tokens=True,
    return_offsets_mapping=True,
    padding="max_length",
)
starts, ends = [], []
for index, offsets in enumerate(windows["offset_mapping"]):
    places = [
        place
        for place, (begin, end) in enumerate(offsets)
        if windows.sequence_ids(index)[place] == 1 and begin < answer[1] and end > answer[0]
    ]
    starts.append(places[0] if places else 0)
    ends.append(places[-1] if places else 0)
data = TensorDataset(
    torch.tensor(windows["input_ids"]),
    torch.tensor(windows["attention_mask"]),
    torch.tensor(starts),
    torch.tensor(ends),
)
loader = DataLoader(data, batch_size=4, drop_last=True, pin_memory=True)
model = AutoModelForQuestionAnswering.from_pretrained(folder).to(device)
for name, parameter in model.named_parameters():
    if "embeddings" in name:
        parameter.requires_grad = False
optimizer = torch.optim.SGD(
    [p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9
)
model.train()
for _epoch in range(2):
    for ids, mask, start, end in loader:
        ids, mask = ids.to(device, non_blocking=True), mask.to(device, non_blocking=True)
        output = model(
            input_ids=ids,
            attention_mask=mask,
            start_positions=start.to(device),
            end_positions=end.to(device),
        )
        optimizer.zero_grad(set_to_none=True)
        output.loss.backward()
        optimizer.step()
    print(output.loss.item(), output.start_logits.argmax(-1).tolist())
