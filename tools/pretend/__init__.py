"""A pretended CUDA GPU, and the course rehearsed on it.

Most machines that test this course have no GPU, so none of the branches that only a GPU takes would
ever run there. On a pretended GPU they do: tensors say `cuda:0`, their memory is the host's, and
the CPU's kernels compute. What it cannot show is speed, and the arithmetic of a GPU.

native/      the C++ library: memory, dispatch, attention
cards        which GPUs can be pretended
build        compiles the library
book         how much memory is taken, by `tight_fit.memory.allocator`, up to the card's limit
cuda         torch.cuda's side in Python
nccl         NCCL's side of torch.distributed, over gloo
startup/     puts all this into a Python process that starts
narrow       full models that are narrow, short texts, few steps: what a CPU can do in minutes
mirror       a mirror of the hub under the real names, with such models
rehearse     runs lessons and labs on a pretended GPU
"""
