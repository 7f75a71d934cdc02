"""What is seen of a program beside its trace? Samples of its stack, what happens in few steps, \
what disturbs them."""
