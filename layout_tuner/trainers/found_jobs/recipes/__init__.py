"""Jobs whose files name what lies in the trainer's tree: Megatron-Bridge and Primus."""
