"""The tab STEP PROFILE of TensorBoard."""
