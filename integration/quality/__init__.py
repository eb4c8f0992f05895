"""Selection quality: what a policy does to a model's answers, on clean and on damaged indexers."""
