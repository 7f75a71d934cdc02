"""Who held the memory?  Snapshots of torch.cuda.memory, replayed: categories, lines, growth."""
