"""How is a training program measured that knows nothing of this project?  From outside, by hooks \
in its processes."""
