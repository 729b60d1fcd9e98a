"""One kernel of a step, as data."""

from __future__ import annotations

from typing import NamedTuple

PHASES = ("forward", "backward", "recompute", "optimizer")
FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = range(len(PHASES))


class Op(NamedTuple):
    """One kernel that a GPU runs.

    name        torch's operation
    kind        "matmul", "attention", "convolution", "depthwise", "softmax", "norm", "batch_norm",
                "reduction", "elementwise", "transpose" (a copy between layouts), "gather",
                "scatter", "multi_tensor" (foreach, fused and 8-bit optimizers) "message" (a
                collective: it takes no time here; `layouts.clocks` times it) or "wait" (the CPU
                asks for a value); of the host's memory "to host", "from host" (copies), "host" (the
                CPU computes) and "await" (the GPU waits for copies): see `kernels.host_memory`
    arithmetic  type of the numbers that are multiplied: "fp32", "fp16", "bf16",
                "fp64" or "fp8"
    flops       multiplications and additions of matrix products, attention and convolutions; 0 for
                all others
    read        bytes read from memory, each operand once
    written     bytes written to memory
    shape       (batch, m, n, k) of matrix products: m × k by k × n. Convolutions as such products:
                batch counts groups, m output pixels of all images, n and k channels and taps.
                Attention: (heads of all examples, queries, keys, width). Norms and softmax: (rows,
                width). Messages: (ranks that take part,). Others: ()
    layout      matmul: "tn", "nn", "nt", "tt" as cuBLAS names it; convolution: "nchw" or "nhwc",
                with "/weights" where it is the weights' gradient; message: the axis of the layout
                that its ranks lie on; "" otherwise
    kernels     launches
    """

    name: str
    kind: str
    arithmetic: str
    flops: int
    read: int
    written: int
    shape: tuple[int, ...] = ()
    layout: str = ""
    kernels: int = 1
