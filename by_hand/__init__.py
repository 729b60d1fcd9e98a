"""What labs build by hand: collectives, ZeRO, tensor and pipeline ranks, a kernel for half2."""
