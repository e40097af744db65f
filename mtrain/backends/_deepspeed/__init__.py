"""What backend deepspeed adds to torch's engine: shards of weights, gradients and moments, and DeepSpeed itself."""
