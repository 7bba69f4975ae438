"""Jobs of Megatron-LM and Megatron-DeepSpeed, from the options of their programs."""
