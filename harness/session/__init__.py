"""How is a training step made ready? Settings, model, shards, compiler, graphs: in one order."""
