"""What labs build by hand: collectives, ZeRO, tensor and pipeline ranks, batches, loops, half2."""
